/* Streams, which are lazy: an operation runs when something in the order of its stream waits for it.
 * What nobody waited for has not happened, and what runs on another stream does not see it. */
#include "standin.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_WAITING = 4096 }; /* of a stream; then the older half is run, as it may be */

static struct stream *streams;
static struct stream *defaults[MAX_DEVICES];
static uint64_t orders;

static struct stream *enlist(int device, unsigned flags, int priority)
{
    struct stream *made = streams;
    while (made && made->state != UNUSED) made = made->next;
    if (!made) {
        made = calloc(1, sizeof *made);
        if (!made) abort();
        made->slot = race_slot();
        made->next = streams;
        streams = made;
    }
    memset(&made->clock, 0, sizeof made->clock);
    made->state = LIVE;
    made->device = device;
    made->flags = flags;
    made->priority = priority;
    return made;
}

struct stream *stream_new(unsigned flags, int priority)
{
    return enlist(thread.device, flags, priority);
}

/* 0 and 1 are the default stream of the current device; so is 2 here, which CUDA has for each thread. */
struct stream *stream_of(void *number)
{
    if ((uintptr_t)number <= 2) {
        struct stream **place = &defaults[thread.device];
        if (!*place) *place = enlist(thread.device, 0, 0);
        return *place;
    }
    for (struct stream *one = streams; one; one = one->next)
        if (one == number && one->state == LIVE) return one;
    return NULL;
}

static void forget_ops(struct stream *stream)
{
    for (struct op *op; (op = stream->first);) {
        stream->first = op->next;
        free(op->data);
        free(op);
    }
    stream->count = 0;
}

/* What was queued still runs, when the device is waited for. */
int stream_drop(struct stream *stream)
{
    stream->state = stream->first ? DESTROYED : UNUSED;
    return OK;
}

/* Whether one is the default stream of a device and the other is not, and waits for it. */
static bool take_turns(const struct stream *one, const struct stream *other)
{
    bool is_default = one == defaults[one->device], other_is = other == defaults[other->device];
    return one->device == other->device && is_default != other_is && !(one->flags & 1) &&
           !(other->flags & 1);
}

struct op *op_new(const char *what, int (*run)(struct op *op))
{
    struct op *made = calloc(1, sizeof *made);
    if (!made) abort();
    made->what = what;
    made->run = run;
    return made;
}

void enqueue(struct stream *stream, struct op *op, const struct span *spans, int count)
{
    for (struct stream *other = streams; other; other = other->next)
        if (take_turns(stream, other)) race_join(&stream->clock, &other->clock);
    race_access(stream, op->what, spans, count);
    op->order = ++orders;
    op->stream = stream;
    *(stream->first ? &stream->last->next : &stream->first) = op;
    stream->last = op;
    if (++stream->count > MOST_WAITING) {
        struct op *middle = stream->first;
        for (int k = 0; k < MOST_WAITING / 2; k++) middle = middle->next;
        run(stream, middle->order);
    }
}

/* Run what was queued up to number `until`, and all that it has to wait for. */
int run(struct stream *stream, uint64_t until)
{
    int status = lost() ? lose(ILLEGAL_ADDRESS) : OK;
    while (!status && stream->first && stream->first->order <= until) {
        struct op *op = stream->first;
        for (struct stream *other = streams; other && !status; other = other->next)
            if (take_turns(stream, other)) status = run(other, op->order - 1);
        if (status || stream->first != op) continue; /* another thread has done it */
        if (stream->busy) { /* a host function, which another thread runs */
            unlocked((void (*)(void *))(void *)sched_yield, NULL);
            continue;
        }
        stream->busy = true;
        status = op->run(op);
        stream->busy = false;
        stream->first = op->next;
        stream->count--;
        free(op->data);
        free(op);
        if (!stream->first && stream->state == DESTROYED) stream->state = UNUSED;
    }
    return status;
}

static int run_before(struct op *op)
{
    for (struct stream *one = streams; one; one = one->next) /* it may be gone, with all it had */
        if (one == op->argument) return run(one, op->bytes);
    return OK;
}

/* A stream goes on when another has done what was queued there up to number `until`. */
void enqueue_wait(struct stream *stream, struct stream *other, uint64_t until)
{
    struct op *op = op_new("a wait", run_before);
    op->argument = other;
    op->bytes = until;
    enqueue(stream, op, NULL, 0);
}

/* On a default stream, a copy between devices waits for all that was queued on either, and what is
 * queued later on either waits for it (CUDA C Programming Guide, "Peer-to-Peer Memory Copy"). */
void enqueue_between(struct stream *stream, struct op *op, const struct span *spans, int device)
{
    bool is_default = stream == defaults[stream->device] && device != stream->device;
    for (struct stream *one = streams; is_default && one; one = one->next)
        if (one->device == device && !(one->flags & 1)) {
            if (one->first) enqueue_wait(stream, one, orders);
            race_join(&stream->clock, &one->clock);
        }
    enqueue(stream, op, spans, 2);
    if (!is_default) return;
    if (!defaults[device]) defaults[device] = enlist(device, 0, 0);
    enqueue_wait(defaults[device], stream, stream->last->order);
    race_join(&defaults[device]->clock, &stream->clock);
}

int wait_stream(struct stream *stream, uint64_t until)
{
    clock_vector seen = stream->clock;
    int status = run(stream, until);
    if (!status && until == FOREVER) race_host_saw(&seen);
    return status ? status : waited();
}

int wait_device(int device)
{
    int status = OK;
    for (struct stream *one = streams; one && !status; one = one->next)
        if (one->device == device && one->state != UNUSED) status = wait_stream(one, FOREVER);
    return status ? status : waited();
}

static bool touches(const struct op *op, uint64_t address, size_t bytes)
{
    uint64_t ends[] = {op->target, op->source};
    for (int k = 0; k < 2; k++)
        if (ends[k] && ends[k] < address + bytes && address < ends[k] + op->bytes) return true;
    return false;
}

bool under_way(uint64_t address, size_t bytes)
{
    for (struct stream *one = streams; one; one = one->next)
        for (struct op *op = one->first; op; op = op->next)
            if (touches(op, address, bytes)) return true;
    return false;
}

/* How much was queued and has not been done. */
PUBLIC size_t standin_waiting(void)
{
    size_t count = 0;
    for (struct stream *one = streams; one; one = one->next) count += one->count;
    return count;
}

void streams_leaks(void)
{
    for (struct stream *one = streams; one; one = one->next)
        if (one->state == LIVE && one != defaults[one->device])
            finding("leak", "a stream of device %d", one->device);
}

bool stream_retired(void *number)
{
    for (struct stream *one = streams; one; one = one->next)
        if (one == number) return one->state == RETIRED;
    return false;
}

/* Who has a stream destroys it yet. */
void streams_reset(void)
{
    for (struct stream *one = streams; one; one = one->next) {
        forget_ops(one);
        memset(&one->clock, 0, sizeof one->clock);
        if (one->state == LIVE) one->state = one == defaults[one->device] ? UNUSED : RETIRED;
    }
    memset(defaults, 0, sizeof defaults);
}

static int run_queued(struct op *op)
{
    if (survives(op->function, op->data, NULL)) return OK;
    finding("use after free", "%s ran when its memory was gone", op->what);
    return lose(ILLEGAL_ADDRESS);
}

/* For libraries beside this one: computes on a stream of the current device. `argument` is freed. */
PUBLIC int standin_queue(const char *what, void (*function)(void *), void *argument,
                         const struct span *spans, int count, void *number)
{
    BEGIN_CONTEXT;
    struct stream *stream = stream_of(number);
    if (!stream) return finish(INVALID_HANDLE);
    struct op *op = op_new(what, run_queued);
    op->function = function;
    op->data = argument;
    enqueue(stream, op, spans, count);
    return finish(OK);
}
