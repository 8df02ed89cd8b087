/* Handles of memory: they say where in /proc another process's memfd is found. */
#include "standin.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* As tests/fake_cuda/cupy/_ipc.py has it. */
struct handle {
    char magic[8];
    uint32_t pid, fd;
    uint64_t started, inode;
    unsigned char uuid[16];
    uint64_t bytes, unused;
};
_Static_assert(sizeof(struct handle) == 64, "as CUDA's");
static const char MAGIC[8] = {'f', 'a', 'k', 'e', 'c', 'u', 'd', 'a'};
enum { LAZY_PEER_ACCESS = 1 };

/* When a process began; 0: there is none. */
static uint64_t started(unsigned pid)
{
    char path[64], text[1024] = "";
    snprintf(path, sizeof path, "/proc/%u/stat", pid);
    FILE *stat = fopen(path, "re");
    if (!stat) return 0;
    size_t bytes = fread(text, 1, sizeof text - 1, stat);
    fclose(stat);
    text[bytes] = 0;
    char *at = strrchr(text, ')');
    for (int field = 0; at && field < 20; field++) at = strchr(at + 1, ' ');
    return at ? strtoull(at, NULL, 10) : 0;
}

int memory_handle(unsigned char *handle, uint64_t address)
{
    struct allocation *found = find_alive(address, 1);
    struct stat about;
    if (!found || found->fd < 0 || fstat(found->fd, &about)) return INVALID_VALUE;
    struct handle made = {
        .pid = (uint32_t)getpid(), .fd = (uint32_t)found->fd, .started = started((unsigned)getpid()),
        .inode = about.st_ino, .bytes = found->bytes,
    };
    memcpy(made.magic, MAGIC, sizeof MAGIC);
    memcpy(made.uuid, devices.at[found->device].uuid, 16);
    memcpy(handle, &made, sizeof made);
    return OK;
}

static int open_foreign(const struct handle *told, int *fd)
{
    char path[64];
    struct stat about;
    if (started(told->pid) != told->started) return INVALID_HANDLE;
    snprintf(path, sizeof path, "/proc/%u/fd/%u", told->pid, told->fd);
    *fd = open(path, O_RDWR | O_CLOEXEC);
    if (*fd < 0) return errno == ENOENT ? MAP_FAILED_ : INVALID_HANDLE;
    if (fstat(*fd, &about) || about.st_ino != told->inode || (uint64_t)about.st_size != told->bytes) {
        close(*fd);
        return MAP_FAILED_;
    }
    return OK;
}

/* Once for a process, counting; for the current device or one that this reaches. */
int memory_open(uint64_t *address, const unsigned char *handle, unsigned flags)
{
    struct handle told;
    memcpy(&told, handle, sizeof told);
    if (flags != LAZY_PEER_ACCESS || memcmp(told.magic, MAGIC, sizeof MAGIC)) return INVALID_VALUE;
    int owner = 0;
    while (owner < devices.count && memcmp(devices.at[owner].uuid, told.uuid, 16)) owner++;
    if (owner == devices.count) return INVALID_VALUE;
    if (told.pid == (uint32_t)getpid()) return NO_CONTEXT;
    if (owner != thread.device) {
        if (!can_access_peer(thread.device, owner)) return NO_PEER;
        devices.at[thread.device].peers[owner] = true;
    }
    struct allocation *found = find_opened(handle);
    if (!found) {
        int fd, status = open_foreign(&told, &fd);
        if (status) return status;
        found = map_device(told.bytes, owner, fd);
        close(fd);
        if (!found) return NO_MEMORY;
        memcpy(found->handle, handle, 64);
    }
    found->opened++;
    *address = found->base;
    return OK;
}

int memory_close(uint64_t address)
{
    struct allocation *found = find(address);
    if (is_retired(address)) return OK;
    if (found && found->fd < 0 && !found->alive)
        finding("double close", "of a handle of %zu bytes", found->bytes);
    if (!found || !found->alive || found->fd >= 0 || found->base != address) return INVALID_VALUE;
    if (--found->opened) return OK;
    if (under_way(found->base, found->bytes))
        finding("use after close", "something on the memory of a handle is still under way");
    drop(found);
    return OK;
}
