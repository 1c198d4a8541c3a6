/* Preloaded library: the k-th file-system call on a path below a folder returns an error instead of running, or is the
 * last one before the power fails (power_cuts.py).
 *
 * arm() is called in the process whose calls count, before it starts workers; the counter is a shared mapping, so its
 * forks count with it. Before arm() every call passes through. With journal() after it the k-th call ends the process
 * group, and every sync and every change of a name is noted: inodes, names, and a link to what a name lost. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct counter { long calls; long failed; char name[16]; char path[PATH_MAX]; long kept; };
static struct counter *counter;
static char folder[PATH_MAX];
static size_t folder_length;
static long fail_at;
static int permanent;
static int notes = -1;
static char backups[PATH_MAX / 2];

static const int OF_READS[] = {EIO, EACCES}, OF_WRITES[] = {ENOSPC, EIO, EDQUOT, EACCES}, OF_DATA[] = {ENOSPC, EIO, EDQUOT};

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

int arm(const char *below, const char *counter_path, long at, int every_later_too) {
    int descriptor = REAL(open)(counter_path, O_RDWR | O_CREAT, 0600);
    if (descriptor < 0 || REAL(ftruncate)(descriptor, sizeof *counter)) return -1;
    void *page = REAL(mmap)(NULL, sizeof *counter, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (page == MAP_FAILED) return -1;
    strncpy(folder, below, sizeof folder - 1);
    folder_length = strlen(folder);
    fail_at = at;
    permanent = every_later_too;
    counter = page;
    return 0;
}

/* Whether this call fails; errno is set. */
static int fails(const char *name, const char *path, const int *errors, int count) {
    if (!counter || strncmp(path, folder, folder_length) || (path[folder_length] && path[folder_length] != '/')) return 0;
    long number = __atomic_add_fetch(&counter->calls, 1, __ATOMIC_SEQ_CST);
    if (number != fail_at && !(permanent && fail_at && number > fail_at && errors == OF_DATA)) return 0;
    if (notes >= 0) {
        if (number == fail_at) { strncpy(counter->name, name, sizeof counter->name - 1); strncpy(counter->path, path, sizeof counter->path - 1); }
        if (number >= fail_at && fail_at) { kill(0, SIGKILL); pause(); }
        return 0;
    }
    if (number == fail_at) {
        strncpy(counter->name, name, sizeof counter->name - 1);
        strncpy(counter->path, path, sizeof counter->path - 1);
        counter->failed = errors[fail_at % count];
    }
    errno = errors[fail_at % count];
    return 1;
}

/* The path from the root, in `whole` of PATH_MAX bytes; 0 if it cannot be told. */
static int whole_path(int at, const char *path, char *whole) {
    char link[64], base[PATH_MAX / 2];
    if (path[0] == '/') return snprintf(whole, PATH_MAX, "%s", path) > 0;
    if (at == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) return 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        ssize_t length = readlink(link, base, sizeof base - 1);
        if (length < 0) return 0;
        base[length] = 0;
    }
    return snprintf(whole, PATH_MAX, "%s/%.2000s", base, path) > 0;
}

static int path_fails(const char *name, int at, const char *path, const int *errors, int count) {
    char whole[PATH_MAX];
    return counter && path && whole_path(at, path, whole) && fails(name, whole, errors, count);
}

static int descriptor_fails(const char *name, int descriptor, const int *errors, int count) {
    char link[64], path[PATH_MAX];
    if (!counter || descriptor < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length <= 0) return 0;
    path[length] = 0;
    return fails(name, path, errors, count);
}

/* Notes of changes of names and of syncs, one line each: kind, inode of the folder, inode of the file, a link to what
 * the name stood for (or -), the name; of a rename also the folder and the name it had. */

int journal(const char *path, const char *backup_folder) {
    notes = REAL(open)(path, O_WRONLY | O_CREAT | O_APPEND, 0600);
    strncpy(backups, backup_folder, sizeof backups - 1);
    return notes < 0 ? -1 : 0;
}

struct place { unsigned long folder, file; char whole[PATH_MAX]; const char *name; int is_directory, exists; };

/* Whether changes of this name are noted; the folder's and the file's inode before the call. */
static int is_noted(int at, const char *path, struct place *place) {
    struct stat state;
    if (notes < 0 || !path || !whole_path(at, path, place->whole) || strncmp(place->whole, folder, folder_length)) return 0;
    char *slash = strrchr(place->whole, '/');
    if (!slash || slash == place->whole) return 0;
    *slash = 0;
    place->folder = REAL(stat)(place->whole, &state) ? 0 : state.st_ino;
    *slash = '/';
    place->name = slash + 1;
    place->exists = !REAL(lstat)(place->whole, &state);
    place->file = place->exists ? state.st_ino : 0;
    place->is_directory = place->exists && S_ISDIR(state.st_mode);
    return place->folder != 0;
}

/* A link to the file, so that its name can be taken back; "-" for none. */
static void keep(const struct place *place, char *backup) {
    strcpy(backup, "-");
    if (!place->exists || place->is_directory) return;
    long number = __atomic_add_fetch(&counter->kept, 1, __ATOMIC_SEQ_CST);
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/%ld", backups, number);
    if (!REAL(link)(place->whole, path)) snprintf(backup, 32, "%ld", number);
}

static void note(char kind, const struct place *place, unsigned long file, const char *backup, const struct place *from) {
    char line[PATH_MAX];
    int length = snprintf(line, sizeof line, "%c\t%lu\t%lu\t%s\t%.500s\t%lu\t%.500s\n", kind, place->folder, file, backup,
                          place->name, from ? from->folder : 0, from ? from->name : "-");
    if (REAL(write)(notes, line, length) != length) abort();
}

static int noted_sync(int (*call)(int), int descriptor) {
    struct stat state;
    char line[128];
    if (notes >= 0 && !fstat(descriptor, &state) && !call(descriptor)) {
        int length = snprintf(line, sizeof line, "S\t%lu\t%lld\t%lld\n", state.st_ino, (long long)state.st_size,
                              state.st_mtim.tv_sec * 1000000000LL + state.st_mtim.tv_nsec);
        if (REAL(write)(notes, line, length) != length) abort();
        return 0;
    }
    return call(descriptor);
}

static int noted_create(int at, const char *path, const struct place *place, int descriptor) {
    struct stat state;
    if (descriptor >= 0 && !place->exists && !fstat(descriptor, &state)) note('C', place, state.st_ino, "-", NULL);
    return descriptor;
}

static int noted_name(char kind, int at, const char *path, int result, const struct place *before) {
    struct place now;
    if (!result && is_noted(at, path, &now)) note(kind, before, now.file, "-", NULL);
    return result;
}

#define NOTED_UNLINK(at, path, call) struct place place; char backup[32]; \
    if (!is_noted(at, path, &place)) return call; \
    keep(&place, backup); \
    int result = call; \
    if (!result) note(place.is_directory ? 'X' : 'U', &place, place.file, backup, NULL); \
    return result;

#define NOTED_RENAME(a, from, b, to, call) struct place old, new; char backup[32]; \
    if (!is_noted(a, from, &old) || !is_noted(b, to, &new)) return call; \
    keep(&new, backup); \
    int result = call; \
    if (!result) note('R', &new, old.file, backup, &old); \
    return result;

#define READS OF_READS, 2
#define WRITES OF_WRITES, 4
#define DATA OF_DATA, 3
#define OPENS(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT) ? OF_WRITES : OF_READS), ((flags) & (O_WRONLY | O_RDWR | O_CREAT) ? 4 : 2)
#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); }

#define OPENED(at, path, call) struct place place; \
    if (!(flags & O_CREAT) || !is_noted(at, path, &place)) return call; \
    return noted_create(at, path, &place, call);
#define OPEN(function) int function(const char *path, int flags, ...) { MODE(flags) \
    if (path_fails("open", AT_FDCWD, path, OPENS(flags))) return -1; \
    OPENED(AT_FDCWD, path, REAL(function)(path, flags, mode)) }
OPEN(open)
OPEN(open64)
#define OPENAT(function) int function(int at, const char *path, int flags, ...) { MODE(flags) \
    if (path_fails("open", at, path, OPENS(flags))) return -1; \
    OPENED(at, path, REAL(function)(at, path, flags, mode)) }
OPENAT(openat)
OPENAT(openat64)

#define WRITE(function, type, result, arguments, names) result function arguments { \
    return descriptor_fails(type, descriptor, DATA) ? (result)-1 : REAL(function) names; }
WRITE(write, "write", ssize_t, (int descriptor, const void *data, size_t size), (descriptor, data, size))
WRITE(pwrite, "write", ssize_t, (int descriptor, const void *data, size_t size, off_t place), (descriptor, data, size, place))
WRITE(pwrite64, "write", ssize_t, (int descriptor, const void *data, size_t size, off64_t place), (descriptor, data, size, place))
int fsync(int descriptor) { return descriptor_fails("fsync", descriptor, DATA) ? -1 : noted_sync(REAL(fsync), descriptor); }
int fdatasync(int descriptor) { return descriptor_fails("fsync", descriptor, DATA) ? -1 : noted_sync(REAL(fdatasync), descriptor); }
WRITE(ftruncate, "truncate", int, (int descriptor, off_t size), (descriptor, size))
WRITE(ftruncate64, "truncate", int, (int descriptor, off64_t size), (descriptor, size))

#define PATH(function, type, kind, arguments, at, path, names) int function arguments { \
    return path_fails(type, at, path, kind) ? -1 : REAL(function) names; }
int rename(const char *from, const char *to) {
    if (path_fails("rename", AT_FDCWD, to, WRITES)) return -1;
    NOTED_RENAME(AT_FDCWD, from, AT_FDCWD, to, REAL(rename)(from, to))
}
int renameat(int a, const char *from, int b, const char *to) {
    if (path_fails("rename", b, to, WRITES)) return -1;
    NOTED_RENAME(a, from, b, to, REAL(renameat)(a, from, b, to))
}
#define MADE(kind, at, path, call) struct place place; \
    if (!is_noted(at, path, &place)) return call; \
    return noted_name(kind, at, path, call, &place);
int mkdir(const char *path, mode_t mode) {
    if (path_fails("mkdir", AT_FDCWD, path, WRITES)) return -1;
    MADE('D', AT_FDCWD, path, REAL(mkdir)(path, mode))
}
int mkdirat(int at, const char *path, mode_t mode) {
    if (path_fails("mkdir", at, path, WRITES)) return -1;
    MADE('D', at, path, REAL(mkdirat)(at, path, mode))
}
int link(const char *from, const char *to) {
    if (path_fails("link", AT_FDCWD, to, WRITES)) return -1;
    MADE('C', AT_FDCWD, to, REAL(link)(from, to))
}
int unlink(const char *path) {
    if (path_fails("unlink", AT_FDCWD, path, READS)) return -1;
    NOTED_UNLINK(AT_FDCWD, path, REAL(unlink)(path))
}
int unlinkat(int at, const char *path, int flags) {
    if (path_fails("unlink", at, path, READS)) return -1;
    NOTED_UNLINK(at, path, REAL(unlinkat)(at, path, flags))
}
int rmdir(const char *path) {
    if (path_fails("unlink", AT_FDCWD, path, READS)) return -1;
    NOTED_UNLINK(AT_FDCWD, path, REAL(rmdir)(path))
}
PATH(stat, "stat", READS, (const char *restrict path, struct stat *restrict state), AT_FDCWD, path, (path, state))
PATH(lstat, "stat", READS, (const char *restrict path, struct stat *restrict state), AT_FDCWD, path, (path, state))
PATH(stat64, "stat", READS, (const char *restrict path, struct stat64 *restrict state), AT_FDCWD, path, (path, state))
PATH(lstat64, "stat", READS, (const char *restrict path, struct stat64 *restrict state), AT_FDCWD, path, (path, state))
PATH(fstatat, "stat", READS, (int at, const char *restrict path, struct stat *restrict state, int flags), at, path, (at, path, state, flags))
PATH(fstatat64, "stat", READS, (int at, const char *restrict path, struct stat64 *restrict state, int flags), at, path, (at, path, state, flags))
PATH(statx, "stat", READS, (int at, const char *restrict path, int flags, unsigned mask, struct statx *restrict state), at, path, (at, path, flags, mask, state))

void *mmap(void *address, size_t size, int protection, int flags, int descriptor, off_t place) {
    static const int errors[] = {ENOMEM, EACCES};
    if (!(flags & MAP_ANONYMOUS) && descriptor_fails("mmap", descriptor, errors, 2)) return MAP_FAILED;
    return REAL(mmap)(address, size, protection, flags, descriptor, place);
}

void *mmap64(void *address, size_t size, int protection, int flags, int descriptor, off64_t place) {
    static const int errors[] = {ENOMEM, EACCES};
    if (!(flags & MAP_ANONYMOUS) && descriptor_fails("mmap", descriptor, errors, 2)) return MAP_FAILED;
    return REAL(mmap64)(address, size, protection, flags, descriptor, place);
}
