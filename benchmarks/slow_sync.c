/* Every sync of a process takes SLOW_SYNC_MS milliseconds longer: what a disk behind a network costs.

   Preload it: LD_PRELOAD=slow_sync.so SLOW_SYNC_MS=15 python ... The delay comes before the real call, in the
   thread that made it, so calls of several threads or processes overlap as they do on such a disk. Covered are
   the calls of libc that promise durability; a file opened with O_SYNC or O_DSYNC, io_uring and a
   system call made without libc are not. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static void wait_for_the_disk(void)
{
    const char *text = getenv("SLOW_SYNC_MS");
    double milliseconds = text ? atof(text) : 0;
    int error = errno;
    struct timespec left;

    if (milliseconds <= 0)
        return;
    left.tv_sec = (time_t)(milliseconds / 1000);
    left.tv_nsec = (long)((milliseconds - 1000.0 * left.tv_sec) * 1e6);
    while (nanosleep(&left, &left) == -1 && errno == EINTR)
        ;
    errno = error;
}

#define REAL(type, name, ...) ((type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name))

int fsync(int fd)
{
    wait_for_the_disk();
    return REAL(int, "fsync", int)(fd);
}

int fdatasync(int fd)
{
    wait_for_the_disk();
    return REAL(int, "fdatasync", int)(fd);
}

int syncfs(int fd)
{
    wait_for_the_disk();
    return REAL(int, "syncfs", int)(fd);
}

void sync(void)
{
    wait_for_the_disk();
    REAL(void, "sync", void)();
}

int sync_file_range(int fd, off64_t offset, off64_t length, unsigned int flags)
{
    if (flags & (SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WAIT_AFTER))
        wait_for_the_disk();
    return REAL(int, "sync_file_range", int, off64_t, off64_t, unsigned int)(fd, offset, length, flags);
}

int msync(void *address, size_t length, int flags)
{
    if (flags & MS_SYNC)
        wait_for_the_disk();
    return REAL(int, "msync", void *, size_t, int)(address, length, flags);
}

ssize_t pwritev2(int fd, const struct iovec *parts, int count, off_t offset, int flags)
{
    if (flags & (RWF_DSYNC | RWF_SYNC))
        wait_for_the_disk();
    return REAL(ssize_t, "pwritev2", int, const struct iovec *, int, off_t, int)(fd, parts, count, offset, flags);
}

ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags)
{
    if (flags & (RWF_DSYNC | RWF_SYNC))
        wait_for_the_disk();
    return REAL(ssize_t, "pwritev64v2", int, const struct iovec *, int, off64_t, int)(fd, parts, count, offset, flags);
}
