/* Preloaded library: the k-th file-system call on a path below a folder returns an error instead of running.
 *
 * arm() is called in the process whose calls count, before it starts workers; the counter is a shared mapping, so its
 * forks count with it. Before arm() every call passes through. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

struct counter { long calls; long failed; char name[16]; char path[PATH_MAX]; };
static struct counter *counter;
static char folder[PATH_MAX];
static size_t folder_length;
static long fail_at;
static int permanent;

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
    if (number == fail_at) {
        strncpy(counter->name, name, sizeof counter->name - 1);
        strncpy(counter->path, path, sizeof counter->path - 1);
        counter->failed = errors[fail_at % count];
    }
    errno = errors[fail_at % count];
    return 1;
}

static int path_fails(const char *name, int at, const char *path, const int *errors, int count) {
    char whole[PATH_MAX], link[64], base[PATH_MAX / 2];
    if (!counter || !path) return 0;
    if (path[0] == '/') return fails(name, path, errors, count);
    if (at == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) return 0;
    } else {
        snprintf(link, sizeof link, "/proc/self/fd/%d", at);
        ssize_t length = readlink(link, base, sizeof base - 1);
        if (length < 0) return 0;
        base[length] = 0;
    }
    snprintf(whole, sizeof whole, "%s/%.2000s", base, path);
    return fails(name, whole, errors, count);
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

#define READS OF_READS, 2
#define WRITES OF_WRITES, 4
#define DATA OF_DATA, 3
#define OPENS(flags) ((flags) & (O_WRONLY | O_RDWR | O_CREAT) ? OF_WRITES : OF_READS), ((flags) & (O_WRONLY | O_RDWR | O_CREAT) ? 4 : 2)
#define MODE(flags) \
    mode_t mode = 0; \
    if ((flags) & (O_CREAT | O_TMPFILE)) { va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); }

#define OPEN(function) int function(const char *path, int flags, ...) { MODE(flags) \
    return path_fails("open", AT_FDCWD, path, OPENS(flags)) ? -1 : REAL(function)(path, flags, mode); }
OPEN(open)
OPEN(open64)
#define OPENAT(function) int function(int at, const char *path, int flags, ...) { MODE(flags) \
    return path_fails("open", at, path, OPENS(flags)) ? -1 : REAL(function)(at, path, flags, mode); }
OPENAT(openat)
OPENAT(openat64)

#define WRITE(function, type, result, arguments, names) result function arguments { \
    return descriptor_fails(type, descriptor, DATA) ? (result)-1 : REAL(function) names; }
WRITE(write, "write", ssize_t, (int descriptor, const void *data, size_t size), (descriptor, data, size))
WRITE(pwrite, "write", ssize_t, (int descriptor, const void *data, size_t size, off_t place), (descriptor, data, size, place))
WRITE(pwrite64, "write", ssize_t, (int descriptor, const void *data, size_t size, off64_t place), (descriptor, data, size, place))
WRITE(fsync, "fsync", int, (int descriptor), (descriptor))
WRITE(fdatasync, "fsync", int, (int descriptor), (descriptor))
WRITE(ftruncate, "truncate", int, (int descriptor, off_t size), (descriptor, size))
WRITE(ftruncate64, "truncate", int, (int descriptor, off64_t size), (descriptor, size))

#define PATH(function, type, kind, arguments, at, path, names) int function arguments { \
    return path_fails(type, at, path, kind) ? -1 : REAL(function) names; }
PATH(rename, "rename", WRITES, (const char *from, const char *to), AT_FDCWD, to, (from, to))
PATH(renameat, "rename", WRITES, (int a, const char *from, int b, const char *to), b, to, (a, from, b, to))
PATH(mkdir, "mkdir", WRITES, (const char *path, mode_t mode), AT_FDCWD, path, (path, mode))
PATH(mkdirat, "mkdir", WRITES, (int at, const char *path, mode_t mode), at, path, (at, path, mode))
PATH(unlink, "unlink", READS, (const char *path), AT_FDCWD, path, (path))
PATH(unlinkat, "unlink", READS, (int at, const char *path, int flags), at, path, (at, path, flags))
PATH(rmdir, "unlink", READS, (const char *path), AT_FDCWD, path, (path))
PATH(link, "link", WRITES, (const char *from, const char *to), AT_FDCWD, to, (from, to))
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
