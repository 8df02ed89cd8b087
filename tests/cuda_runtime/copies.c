/* Copies and fills. They keep addresses only: what is gone when a copy runs is an illegal address. */
#include "standin.h"

#include <string.h>

enum { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, DEFAULT };
static uint64_t copied[4]; /* bytes, by kind */

/* Whether device memory is meant: 1, 0, or -1 if it does not reach that far. */
static int on_device(uint64_t address, size_t bytes)
{
    struct allocation *found = find(address);
    if (!address) return -1;
    if (!found) return 0;
    if (find_alive(address, bytes)) return 1;
    if (found->alive)
        finding("out of bounds", "%zu bytes where an allocation has %zu", bytes,
                (size_t)(found->base + found->bytes - address));
    else
        finding("use after free", "of %zu bytes of device %d", bytes, found->device);
    return -1;
}

static void move(void *argument)
{
    const struct op *op = argument;
    memmove((void *)(uintptr_t)op->target, (const void *)(uintptr_t)op->source, op->bytes);
}

static void set(void *argument)
{
    const struct op *op = argument;
    memset((void *)(uintptr_t)op->target, op->value, op->bytes);
}

static int gone(const struct op *op)
{
    finding("use after free", "%s of %zu bytes ran when its memory was gone", op->what, op->bytes);
    return lose(ILLEGAL_ADDRESS);
}

/* Device memory that was freed meanwhile; what the host has freed is seen by touching it. */
static bool is_freed(uint64_t address, size_t bytes)
{
    return find(address) && !find_alive(address, bytes);
}

static int run_copy(struct op *op)
{
    uint64_t apart = op->target > op->source ? op->target - op->source : op->source - op->target;
    if (apart < op->bytes) {
        finding("overlap", "a copy of %zu bytes to where they partly are", op->bytes);
        return lose(ILLEGAL_ADDRESS);
    }
    if (is_freed(op->target, op->bytes) || is_freed(op->source, op->bytes)) return gone(op);
    if (!survives(move, op, NULL)) return gone(op);
    copied[op->value] += op->bytes;
    return OK;
}

static int run_fill(struct op *op)
{
    if (is_freed(op->target, op->bytes) || !survives(set, op, NULL)) return gone(op);
    return OK;
}

/* Of a copy between devices the one that is not the stream's. */
static int other_device(const struct stream *stream, uint64_t target, uint64_t source)
{
    int device = find(target)->device;
    return device == stream->device ? find(source)->device : device;
}

int copy(uint64_t target, uint64_t source, size_t bytes, int kind, struct stream *stream)
{
    if (!bytes) return OK;
    int to = on_device(target, bytes), from = on_device(source, bytes);
    if (to < 0 || from < 0) return INVALID_VALUE;
    int actual = from * DEVICE_TO_HOST + to;
    if (kind != actual && kind != DEFAULT) {
        finding("wrong kind", "a copy of kind %d that is one of kind %d", kind, actual);
        return INVALID_VALUE;
    }
    struct op *op = op_new("a copy", run_copy);
    op->target = target;
    op->source = source;
    op->bytes = bytes;
    op->value = actual;
    const struct span spans[] = {{target, bytes, true}, {source, bytes, false}};
    if (!to || !from)
        enqueue(stream, op, spans, 2);
    else
        enqueue_between(stream, op, spans, other_device(stream, target, source));
    return OK;
}

int fill(uint64_t target, int value, size_t bytes, struct stream *stream)
{
    if (!bytes) return OK;
    if (on_device(target, bytes) != 1) return INVALID_VALUE;
    struct op *op = op_new("a fill", run_fill);
    op->target = target;
    op->value = value;
    op->bytes = bytes;
    const struct span span = {target, bytes, true};
    enqueue(stream, op, &span, 1);
    return OK;
}

/* What has really been copied: bytes of a kind. */
PUBLIC uint64_t standin_copied(int kind) { return copied[kind & 3]; }
