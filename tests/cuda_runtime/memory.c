/* Device memory: mappings of memfds named "fakecuda<device>:<bytes>", with the host's number of the
 * device. Addresses lie in one reserved range and are not given again, with a page that cannot be
 * touched between any two: what was freed is known as such, and who goes beyond an end fails. */
#include "standin.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { UNIT = 512, PAGE = 4096, POISON = 0xA5, POISONED = 1 << 16 };
static const size_t RANGE = (size_t)1 << 38;

static struct allocation **table; /* sorted: addresses only grow */
static size_t count, room;
static uint64_t start, next, retired; /* below `retired`: of before the last reset */

struct host_memory *host_memory;

/* -------------------------------------------------------------------------------------- device */

static size_t pages(size_t bytes) { return (bytes + PAGE - 1) / PAGE * PAGE; }

struct allocation *find(uint64_t address)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (table[middle]->base <= address)
            low = middle + 1;
        else
            high = middle;
    }
    if (!low) return NULL;
    struct allocation *found = table[low - 1];
    return address < found->base + found->bytes ? found : NULL;
}

struct allocation *find_alive(uint64_t address, size_t bytes)
{
    struct allocation *found = find(address);
    bool inside = found && found->alive && address + bytes <= found->base + found->bytes;
    return inside ? found : NULL;
}

struct allocation *find_opened(const unsigned char *handle)
{
    for (size_t k = 0; k < count; k++)
        if (table[k]->alive && table[k]->fd < 0 && !memcmp(table[k]->handle, handle, 64))
            return table[k];
    return NULL;
}

size_t used(int device)
{
    size_t bytes = 0;
    for (size_t k = 0; k < count; k++)
        if (table[k]->alive && table[k]->fd >= 0 && table[k]->device == device)
            bytes += table[k]->bytes;
    return bytes;
}

/* NULL: there is no room. The descriptor stays the caller's. */
struct allocation *map_device(size_t bytes, int device, int fd)
{
    if (!start) {
        void *range = mmap(NULL, RANGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (range == MAP_FAILED) return NULL;
        start = next = (uint64_t)(uintptr_t)range;
    }
    if (pages(bytes) + PAGE > start + RANGE - next) return NULL;
    if (count == room) {
        room = room ? 2 * room : 64;
        table = realloc(table, room * sizeof(void *));
        if (!table) abort();
    }
    void *at = mmap((void *)(uintptr_t)next, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    if (at == MAP_FAILED) return NULL;
    struct allocation *made = table[count++] = malloc(sizeof *made);
    if (!made) abort();
    *made = (struct allocation){.base = next, .bytes = bytes, .device = device, .fd = -1, .alive = true};
    next += pages(bytes) + PAGE;
    return made;
}

void drop(struct allocation *found)
{
    mmap((void *)(uintptr_t)found->base, pages(found->bytes), PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (found->fd >= 0) close(found->fd);
    found->alive = false;
}

bool is_retired(uint64_t address) { return start && start <= address && address < retired; }

int memory_new(uint64_t *address, size_t bytes)
{
    *address = 0;
    if (!bytes) return OK;
    int device = thread.device;
    bytes = (bytes + UNIT - 1) / UNIT * UNIT;
    if (bytes > device_bytes() || used(device) > device_bytes() - bytes) return NO_MEMORY;
    char name[64];
    snprintf(name, sizeof name, "fakecuda%d:%zu", devices.at[device].index, bytes);
    int fd = (int)syscall(SYS_memfd_create, name, MFD_CLOEXEC);
    if (fd < 0) return NO_MEMORY;
    struct allocation *made = ftruncate(fd, (off_t)bytes) ? NULL : map_device(bytes, device, fd);
    if (!made) {
        close(fd);
        return NO_MEMORY;
    }
    made->fd = fd;
    memset((void *)(uintptr_t)made->base, POISON, bytes < POISONED ? bytes : POISONED);
    *address = made->base;
    return OK;
}

/* Waits for the device, as the real one does. */
int memory_free(uint64_t address)
{
    if (!address) return OK;
    struct allocation *found = find(address);
    if (is_retired(address)) return OK;
    if (!found || found->base != address) {
        finding("invalid free", "of what no allocation begins with");
        return INVALID_VALUE;
    }
    if (!found->alive) {
        finding("double free", "of %zu bytes of device %d", found->bytes, found->device);
        return INVALID_VALUE;
    }
    if (found->fd < 0) return INVALID_VALUE;
    int status = wait_device(found->device);
    if (status) return status;
    if (!found->alive) return INVALID_VALUE; /* another thread has freed it meanwhile */
    drop(found);
    return OK;
}

/* ---------------------------------------------------------------------------------------- host */

struct host_memory *find_host(uint64_t address)
{
    for (struct host_memory *one = host_memory; one; one = one->next)
        if (one->base <= address && address < one->base + one->bytes) return one;
    return NULL;
}

static struct host_memory **place_of(uint64_t base, bool registered)
{
    struct host_memory **place = &host_memory;
    while (*place && ((*place)->base != base || (*place)->registered != registered))
        place = &(*place)->next;
    return place;
}

static void enlist(uint64_t base, size_t bytes, unsigned flags, bool registered)
{
    struct host_memory *made = calloc(1, sizeof *made);
    *made = (struct host_memory){host_memory, base, bytes, flags, registered};
    host_memory = made;
}

static void forget(struct host_memory **place)
{
    struct host_memory *gone = *place;
    *place = gone->next;
    free(gone);
}

int host_new(void **address, size_t bytes, unsigned flags)
{
    *address = NULL;
    if (!bytes) return OK;
    void *at = mmap(NULL, pages(bytes), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) return NO_MEMORY;
    enlist((uint64_t)(uintptr_t)at, bytes, flags, false);
    *address = at;
    return OK;
}

int host_free(uint64_t address)
{
    if (!address) return OK;
    struct host_memory **place = place_of(address, false);
    if (!*place) {
        finding("invalid free", "of host memory that was not allocated, or is free already");
        return INVALID_VALUE;
    }
    for (int device = 0; device < devices.count; device++) {
        int status = wait_device(device);
        if (status) return status;
    }
    place = place_of(address, false);
    if (!*place) return INVALID_VALUE; /* another thread has freed it meanwhile */
    munmap((void *)(uintptr_t)address, pages((*place)->bytes));
    forget(place);
    return OK;
}

/* 0: not all of these bytes are mapped, 1: some cannot be written, 2: all can. */
static int rights(uint64_t address, size_t bytes)
{
    uint64_t end = address + bytes, low, high;
    char line[4352], mode[5];
    int found = 0, least = 2;
    FILE *maps = fopen("/proc/self/maps", "re");
    while (maps && !found && fgets(line, sizeof line, maps)) {
        if (sscanf(line, "%lx-%lx %4s", &low, &high, mode) != 3) continue;
        if (low > address || address >= high || mode[0] != 'r') continue;
        if (mode[1] != 'w') least = 1;
        address = high;
        if (address >= end) found = least;
    }
    if (maps) fclose(maps);
    return found;
}

enum { READ_ONLY = 8 };

int host_pin(uint64_t address, size_t bytes, unsigned flags)
{
    const char *mode = setting("PIN", "readonly");
    if (!strcmp(mode, "no")) return OS_REFUSED;
    if (flags & READ_ONLY && !pins_read_only()) return NOT_SUPPORTED;
    for (struct host_memory *one = host_memory; one; one = one->next)
        if (one->base < address + bytes && address < one->base + one->bytes) return ALREADY_REGISTERED;
    int may = bytes ? rights(address, bytes) : 0;
    if (!may || (strcmp(mode, "all") && may == 1 && !(flags & READ_ONLY))) return INVALID_VALUE;
    enlist(address, bytes, flags, true);
    return OK;
}

/* While a copy is under way the device would lose sight of the memory. */
int host_unpin(uint64_t address)
{
    struct host_memory **place = place_of(address, true);
    if (!*place) {
        finding("invalid unregister", "of host memory that is not registered");
        return NOT_REGISTERED;
    }
    if (under_way(address, (*place)->bytes)) {
        finding("use after unregister", "a copy of registered host memory is still under way");
        return lose(ILLEGAL_ADDRESS);
    }
    forget(place);
    return OK;
}

/* -------------------------------------------------------------------------------------- control */

void memory_leaks(void)
{
    for (size_t k = 0; k < count; k++)
        if (table[k]->alive)
            finding("leak", "%zu bytes of device %d, %s", table[k]->bytes, table[k]->device,
                    table[k]->fd < 0 ? "an opened handle" : "allocated");
    for (struct host_memory *one = host_memory; one; one = one->next)
        finding("leak", "%zu bytes of the host, %s", one->bytes,
                one->registered ? "registered" : "allocated");
}

/* Allocated host memory stays: who has it gives it back. */
void memory_reset(void)
{
    for (size_t k = 0; k < count; k++)
        if (table[k]->alive) drop(table[k]);
    retired = next;
    for (struct host_memory **place = &host_memory; *place;)
        if ((*place)->registered)
            forget(place);
        else
            place = &(*place)->next;
}

/* Bytes this process has allocated on a device. */
PUBLIC size_t standin_used(int device) { return used(device); }

/* The k-th registration: its address, or 0 beyond the last one. */
PUBLIC uint64_t standin_pinned(int k, size_t *bytes, unsigned *flags)
{
    for (struct host_memory *one = host_memory; one; one = one->next)
        if (one->registered && !k--) {
            *bytes = one->bytes;
            *flags = one->flags;
            return one->base;
        }
    return 0;
}

/* The k-th allocation that is alive, opened ones included: its address, or 0. */
PUBLIC uint64_t standin_allocation(int k, size_t *bytes, int *device)
{
    for (size_t at = 0; at < count; at++)
        if (table[at]->alive && !k--) {
            *bytes = table[at]->bytes;
            *device = table[at]->device;
            return table[at]->base;
        }
    return 0;
}
