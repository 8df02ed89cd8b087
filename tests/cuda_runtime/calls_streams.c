/* The runtime's calls for streams and events. */
#include "standin.h"

#include <stdlib.h>

/* ------------------------------------------------------------------------------------- streams */

PUBLIC int cudaStreamCreateWithPriority(struct stream **stream, unsigned flags, int priority)
{
    BEGIN_CONTEXT;
    if (flags > 1) return finish(INVALID_VALUE);
    *stream = stream_new(flags, priority);
    return finish(OK);
}

PUBLIC int cudaStreamCreateWithFlags(struct stream **stream, unsigned flags)
{
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

PUBLIC int cudaStreamCreate(struct stream **stream)
{
    return cudaStreamCreateWithPriority(stream, 0, 0);
}

PUBLIC int cudaStreamDestroy(void *number)
{
    BEGIN_CONTEXT;
    if (stream_retired(number)) return finish(OK);
    FIND_STREAM(number);
    return finish((uintptr_t)number <= 2 ? INVALID_HANDLE : stream_drop(stream));
}

STREAM_CALL(cudaStreamSynchronize, (void *number), wait_stream(stream, FOREVER))

/* "Not ready" once when there is work left, which is done meanwhile. */
PUBLIC int cudaStreamQuery(void *number)
{
    BEGIN_CONTEXT;
    FIND_STREAM(number);
    bool ready = !stream->first;
    int status = wait_stream(stream, FOREVER);
    return finish(status ? status : ready ? OK : NOT_READY);
}

STREAM_CALL(cudaStreamGetFlags, (void *number, unsigned *flags), (*flags = stream->flags, OK))
STREAM_CALL(cudaStreamGetPriority, (void *number, int *priority), (*priority = stream->priority, OK))
STREAM_CALL(cudaStreamIsCapturing, (void *number, int *status), (*status = 0, OK))

static int run_function(struct op *op)
{
    unlocked(op->function, op->argument);
    return OK;
}

PUBLIC int cudaLaunchHostFunc(void *number, void (*function)(void *), void *argument)
{
    BEGIN_CONTEXT;
    FIND_STREAM(number);
    struct op *op = op_new("a host function", run_function);
    op->function = function;
    op->argument = argument;
    enqueue(stream, op, NULL, 0);
    return finish(OK);
}

struct callback {
    void (*function)(void *stream, int status, void *argument);
    void *stream, *argument;
};

static void call_back(void *argument)
{
    const struct callback *told = argument;
    told->function(told->stream, OK, told->argument);
}

PUBLIC int cudaStreamAddCallback(void *number, void (*function)(void *, int, void *), void *argument,
                                 unsigned flags)
{
    BEGIN_CONTEXT;
    FIND_STREAM(number);
    if (flags) return finish(INVALID_VALUE);
    struct op *op = op_new("a callback", run_function);
    struct callback *told = op->data = malloc(sizeof *told);
    *told = (struct callback){function, number, argument};
    op->function = call_back;
    op->argument = told;
    enqueue(stream, op, NULL, 0);
    return finish(OK);
}

/* -------------------------------------------------------------------------------------- events */

PUBLIC int cudaEventCreateWithFlags(struct event **event, unsigned flags)
{
    BEGIN_CONTEXT;
    *event = event_new(flags);
    return finish(*event ? OK : INVALID_VALUE);
}

PUBLIC int cudaEventCreate(struct event **event) { return cudaEventCreateWithFlags(event, 0); }

PUBLIC int cudaEventDestroy(void *number)
{
    BEGIN;
    if (event_retired(number)) return finish(OK);
    FIND_EVENT(number);
    return finish(event_drop(event));
}

/* For a call with an event and a stream. */
static int with_stream(struct event *event, void *number, int (*function)(struct event *, struct stream *))
{
    struct stream *stream = stream_of(number);
    return stream ? function(event, stream) : INVALID_HANDLE;
}

EVENT_CALL(cudaEventRecord, (void *number, void *stream), with_stream(event, stream, event_record))
EVENT_CALL(cudaStreamWaitEvent, (void *stream, void *number, unsigned flags),
           flags > 1 ? INVALID_VALUE : with_stream(event, stream, event_wait))
EVENT_CALL(cudaEventQuery, (void *number), event_query(event))
EVENT_CALL(cudaEventSynchronize, (void *number), event_synchronize(event))

PUBLIC int cudaEventElapsedTime(float *ms, void *start_number, void *number)
{
    BEGIN_CONTEXT;
    struct event *start = event_of(start_number);
    FIND_EVENT(number);
    return finish(start ? event_elapsed(ms, start, event) : INVALID_HANDLE);
}

PUBLIC int cudaEventElapsedTime_v2(float *ms, void *start, void *end)
{
    return cudaEventElapsedTime(ms, start, end);
}
