/* Events. What has a handle has run when it was recorded: other processes cannot make it run. */
#include "standin.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { DISABLE_TIMING = 2, INTERPROCESS = 4 };
static struct event *events;

static struct event *enlist(unsigned flags, int fd)
{
    struct event *made = calloc(1, sizeof *made);
    if (!made) abort();
    made->flags = flags;
    made->device = thread.device;
    made->fd = fd;
    if (fd >= 0) {
        void *at = mmap(NULL, sizeof *made->shared, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (at == MAP_FAILED) {
            free(made);
            return NULL;
        }
        made->shared = at;
    }
    made->next = events;
    return events = made;
}

struct event *event_new(unsigned flags)
{
    if (!(flags & INTERPROCESS)) return enlist(flags, -1);
    if (!(flags & DISABLE_TIMING)) return NULL;
    int fd = (int)syscall(SYS_memfd_create, "fakeevent", MFD_CLOEXEC);
    struct event *made = fd < 0 || ftruncate(fd, sizeof(struct shared_event)) ? NULL : enlist(flags, fd);
    if (!made && fd >= 0) close(fd);
    return made;
}

struct event *event_of(void *number)
{
    for (struct event *one = events; one; one = one->next)
        if (one == number && !one->retired) return one;
    return NULL;
}

bool event_retired(void *number)
{
    for (struct event *one = events; one; one = one->next)
        if (one == number) return one->retired;
    return false;
}

static int mark(struct op *op)
{
    struct event *event = event_of(op->argument);
    struct timespec now;
    if (!event || event->order != op->order) return OK; /* recorded again meanwhile, or gone */
    clock_gettime(CLOCK_MONOTONIC, &now);
    event->time = (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
    event->order = 0;
    if (event->shared) event->shared->done = event->shared->recorded;
    return OK;
}

int event_drop(struct event *event)
{
    struct event **place = &events;
    while (*place != event) place = &(*place)->next;
    *place = event->next;
    if (event->shared) munmap(event->shared, sizeof *event->shared);
    if (event->fd >= 0) close(event->fd);
    free(event);
    return OK;
}

int event_record(struct event *event, struct stream *stream)
{
    if (event->device != stream->device) return INVALID_HANDLE;
    struct op *op = op_new("an event", mark);
    op->argument = event;
    enqueue(stream, op, NULL, 0);
    event->stream = stream;
    event->order = op->order;
    event->clock = stream->clock;
    if (!event->shared) return OK;
    event->shared->recorded++;
    return run(stream, event->order);
}

int event_wait(struct event *event, struct stream *stream)
{
    if (event->order && event->stream != stream) enqueue_wait(stream, event->stream, event->order);
    race_join(&stream->clock, &event->clock);
    return OK;
}

int event_synchronize(struct event *event)
{
    clock_vector seen = event->clock;
    int status = event->order ? wait_stream(event->stream, event->order) : waited();
    if (!status) race_host_saw(&seen);
    return status;
}

/* "Not ready" once when there is work before it, which is done meanwhile. */
int event_query(struct event *event)
{
    bool ready = !event->order || !event->stream->first || event->stream->first->order >= event->order;
    int status = event_synchronize(event);
    return status ? status : ready ? OK : NOT_READY;
}

int event_elapsed(float *ms, struct event *start, struct event *end)
{
    if ((start->flags | end->flags) & DISABLE_TIMING || !start->stream || !end->stream)
        return INVALID_HANDLE;
    if (start->order || end->order) return NOT_READY;
    *ms = (float)(end->time - start->time);
    return OK;
}

/* ----------------------------------------------------------------------------------- handles */

struct handle {
    char magic[8];
    uint32_t pid, fd;
    char unused[48];
};
static const char MAGIC[8] = {'f', 'a', 'k', 'e', 'e', 'v', 'n', 't'};

int event_handle(unsigned char *handle, struct event *event)
{
    if (!event->shared) return INVALID_HANDLE;
    struct handle made = {.pid = (uint32_t)getpid(), .fd = (uint32_t)event->fd};
    memcpy(made.magic, MAGIC, sizeof MAGIC);
    memcpy(handle, &made, sizeof made);
    return OK;
}

int event_open(struct event **event, const unsigned char *handle)
{
    struct handle told;
    char path[64];
    memcpy(&told, handle, sizeof told);
    if (memcmp(told.magic, MAGIC, sizeof MAGIC)) return INVALID_VALUE;
    if (told.pid == (uint32_t)getpid()) return NO_CONTEXT;
    snprintf(path, sizeof path, "/proc/%u/fd/%u", told.pid, told.fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0) return errno == ENOENT ? MAP_FAILED_ : INVALID_HANDLE;
    *event = enlist(INTERPROCESS | DISABLE_TIMING, fd);
    if (!*event) close(fd);
    return *event ? OK : INVALID_HANDLE;
}

void events_leaks(void)
{
    for (struct event *one = events; one; one = one->next)
        if (!one->retired) finding("leak", "an event of device %d", one->device);
}

/* Who has an event destroys it yet. */
void events_reset(void)
{
    for (struct event *one = events; one; one = one->next) {
        one->retired = true;
        one->order = 0;
    }
}
