/* Preloaded library: the k-th file-system call on a path below a folder returns an error instead of running, or is the
 * last one before the power fails (power_cuts.py).
 *
 * arm() is called in the process whose calls count, before it starts workers; the counter is a shared mapping, so its
 * forks count with it. Before arm() every call passes through. With journal() after it the k-th call ends the process
 * group, and every sync and every change of a name is noted: inodes, names, and a link to what a name lost. With
 * explore() after it each call of the main thread fails in a fork, in a copy of the folder. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
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

static int questions = -1, answers = -1; /* pipes of explore() */
static pid_t explorer;
static char copy[PATH_MAX / 2], copy_log[PATH_MAX / 2];

#define CHECK(condition) do { if (!(condition)) { dprintf(2, "failing_calls.c:%d: %s: %m\n", __LINE__, #condition); _exit(99); } } while (0)

/* From now on this process sees `whole`, a copy, in the place of the folder. */
int enter(const char *whole, const char *place) {
    return unshare(CLONE_NEWNS) || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) || mount(whole, place, NULL, MS_BIND, NULL);
}

struct descriptor { int number, same_as, flags, is_removed, lock; off_t offset; char path[PATH_MAX]; };

/* LOCK_EX or LOCK_SH if this description holds one, else 0. */
static int lock_of(int number) {
    char name[64], line[256];
    int lock = 0;
    snprintf(name, sizeof name, "/proc/self/fdinfo/%d", number);
    FILE *lines = fopen(name, "r");
    CHECK(lines);
    while (fgets(line, sizeof line, lines))
        if (strstr(line, "FLOCK")) lock = strstr(line, "WRITE") ? LOCK_EX : LOCK_SH;
    fclose(lines);
    return lock;
}

/* Open files and folders, with their positions and locks. */
static int list_descriptors(struct descriptor *list, int most) {
    int count = 0;
    DIR *folders = opendir("/proc/self/fd");
    CHECK(folders);
    for (struct dirent *entry; (entry = readdir(folders));) {
        struct descriptor *file = &list[count];
        struct stat state;
        file->number = atoi(entry->d_name);
        if (file->number <= 2 || file->number == dirfd(folders) || fstat(file->number, &state)) continue;
        if (!S_ISREG(state.st_mode) && !S_ISDIR(state.st_mode)) continue;
        ssize_t length = readlinkat(dirfd(folders), entry->d_name, file->path, sizeof file->path - 1);
        CHECK(length > 0);
        file->path[length] = 0;
        if (!strncmp(file->path, "/proc/", 6) || !strncmp(file->path, "/memfd:", 7)) continue;
        file->is_removed = state.st_nlink == 0;
        file->flags = fcntl(file->number, F_GETFL);
        file->offset = S_ISREG(state.st_mode) ? lseek(file->number, 0, SEEK_CUR) : 0;
        file->lock = lock_of(file->number);
        file->same_as = -1;
        for (int k = 0; k < count; k++)
            if (!syscall(SYS_kcmp, getpid(), getpid(), 0 /* KCMP_FILE */, list[k].number, file->number)) file->same_as = list[k].number;
        CHECK(++count < most);
    }
    closedir(folders);
    return count;
}

/* Opens the file in this process's copy of the folder, under the same number, at the same position. */
static void open_again(const struct descriptor *file) {
    int close_flag = fcntl(file->number, F_GETFD) & FD_CLOEXEC ? O_CLOEXEC : 0;
    if (file->same_as >= 0) { CHECK(dup3(file->same_as, file->number, close_flag) == file->number); return; }
    int number = REAL(open)(file->is_removed ? copy : file->path, (file->flags & (O_ACCMODE | O_APPEND)) | (file->is_removed ? O_TMPFILE | O_RDWR : 0), 0600);
    CHECK(number >= 0);
    char block[65536];
    ssize_t length;
    for (off_t place = 0; file->is_removed && (length = pread(file->number, block, sizeof block, place)) > 0; place += length)
        CHECK(REAL(pwrite)(number, block, length, place) == length);
    if (file->offset) CHECK(lseek(number, file->offset, SEEK_SET) == file->offset);
    CHECK(dup3(number, file->number, close_flag) == file->number);
    close(number);
    if (file->lock) CHECK(!flock(file->number, file->lock | LOCK_NB));
}

/* Maps the files again that the process writes through a map. */
static void map_again(void) {
    FILE *maps = fopen("/proc/self/maps", "r");
    char line[PATH_MAX + 128];
    CHECK(maps);
    while (fgets(line, sizeof line, maps)) {
        unsigned long begin, end, place;
        char kind[8], path[PATH_MAX];
        if (sscanf(line, "%lx-%lx %7s %lx %*s %*s %[^\n]", &begin, &end, kind, &place, path) != 5) continue;
        if (kind[1] != 'w' || kind[3] != 's' || strncmp(path, folder, folder_length)) continue;
        int number = REAL(open)(path, O_RDWR);
        CHECK(number >= 0);
        CHECK(REAL(mmap)((void *)begin, end - begin, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, number, place) != MAP_FAILED);
        close(number);
    }
    fclose(maps);
}

/* In the fork: the copy in the folder's place, files and log of its own. */
static void leave_explorer(void) {
    static struct descriptor list[512];
    close(questions);
    close(answers);
    setsid();
    int log = REAL(open)(copy_log, O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
    CHECK(log >= 0 && dup2(log, 1) == 1 && dup2(log, 2) == 2);
    close(log);
    int count = list_descriptors(list, 512);
    CHECK(!enter(copy, folder));
    for (int k = 0; k < count; k++) open_again(&list[k]);
    map_again();
}

#define PYTHON(type, name, ...) ((type (*)(__VA_ARGS__))dlsym(RTLD_DEFAULT, #name))

/* Asks whether the call shall fail; if so, 1 in a fork of this process, and 0 here once that has ended. */
static int forks(long number, const char *name, const char *path, int error) {
    struct counter *counted = counter;
    char answer;
    int status, here = errno;
    dprintf(questions, "%ld\t%d\t%s\t%s\n", number, error, name, path);
    CHECK(read(answers, &answer, 1) == 1);
    if (answer == 'n') { errno = here; return 0; }
    counter = NULL;
    int state = PYTHON(int, PyGILState_Ensure, void)();
    PYTHON(void, PyOS_BeforeFork, void)();
    pid_t child = fork();
    if (child == 0) {
        PYTHON(void, PyOS_AfterFork_Child, void)();
        leave_explorer();
        counted = REAL(mmap)(NULL, sizeof *counter, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
        CHECK(counted != MAP_FAILED);
        counted->calls = number;
        explorer = 0;
        fail_at = number;
        permanent = answer == 'a';
    } else {
        PYTHON(void, PyOS_AfterFork_Parent, void)();
        CHECK(child > 0);
        dprintf(questions, "%d\n", child);
        CHECK(waitpid(child, &status, 0) == child);
        dprintf(questions, "%d\n", status);
        CHECK(read(answers, &answer, 1) == 1);
    }
    PYTHON(void, PyGILState_Release, int)(state);
    counter = counted;
    errno = here;
    return child == 0;
}

/* Each call of this process's main thread is asked about: a line NUMBER ERRNO NAME PATH to the first pipe, and from the
 * second a byte: n (it does not fail), o (it fails once) or a (later writes fail too). If it fails, it does in a fork,
 * which sees the folder `whole` in place of the work folder and writes its output to `log`; two lines follow, the fork's
 * process id and its wait status, and a byte is read before this process goes on. */
int explore(const char *asks, const char *is_told, const char *whole, const char *log) {
    questions = REAL(open)(asks, O_WRONLY | O_CLOEXEC);
    answers = REAL(open)(is_told, O_RDONLY | O_CLOEXEC);
    strncpy(copy, whole, sizeof copy - 1);
    strncpy(copy_log, log, sizeof copy_log - 1);
    explorer = getpid();
    return questions < 0 || answers < 0;
}

/* Whether this call fails; errno is set. */
static int fails(const char *name, const char *path, const int *errors, int count) {
    if (!counter || strncmp(path, folder, folder_length) || (path[folder_length] && path[folder_length] != '/')) return 0;
    long number = __atomic_add_fetch(&counter->calls, 1, __ATOMIC_SEQ_CST);
    if (explorer && explorer == syscall(SYS_gettid) && !forks(number, name, path, errors[number % count])) return 0;
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
