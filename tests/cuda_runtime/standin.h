/* What the parts of the stand-in for CUDA share: core.c has the lock and the findings, devices.c and
 * memory.c what there is, streams.c what waits to be done, calls_*.c and driver.c the calls. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define PUBLIC __attribute__((visibility("default")))
#define PRINTF(at, first) __attribute__((format(printf, at, first)))

/* Statuses: the runtime's and the driver's numbers are the same for these. */
enum {
    OK = 0,
    INVALID_VALUE = 1,
    NO_MEMORY = 2,
    NOT_INITIALIZED = 3,
    OLD_DRIVER = 35,
    NO_DEVICE = 100,
    INVALID_DEVICE = 101,
    INVALID_IMAGE = 200,
    NO_CONTEXT = 201,
    MAP_FAILED_ = 205,
    NO_PEER = 217,
    OS_REFUSED = 304,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    NOT_READY = 600,
    ILLEGAL_ADDRESS = 700,
    PEER_ENABLED = 704,
    PEER_NOT_ENABLED = 705,
    ALREADY_REGISTERED = 712,
    NOT_REGISTERED = 713,
    NOT_PERMITTED = 800,
    NOT_SUPPORTED = 801,
};

enum { MAX_DEVICES = 16, MAX_SLOTS = 256 };

/* ------------------------------------------------------------------------------------ core.c */

/* What every call begins and ends with. `begin` takes the lock, unless it returns a failure. */
int begin(const char *call, bool context);
int finish(int status);
/* As `begin` for calls that work without a device. */
void begin_bare(const char *call);

#define BEGIN                                     \
    int begun = begin(__func__, false);           \
    if (begun) return begun
/* For calls that use the current device: they make its context. */
#define BEGIN_CONTEXT                             \
    int begun = begin(__func__, true);            \
    if (begun) return begun

#define FIND_STREAM(number)                       \
    struct stream *stream = stream_of(number);    \
    if (!stream) return finish(INVALID_HANDLE)
#define FIND_EVENT(number)                        \
    struct event *event = event_of(number);       \
    if (!event) return finish(INVALID_HANDLE)

/* A call that ends with the status an expression has; others are for the stream or event `number`. */
#define CALL(name, parameters, ...) PUBLIC int name parameters { BEGIN_CONTEXT; return finish(__VA_ARGS__); }
/* As `CALL`, without a context. */
#define QUERY(name, parameters, ...) PUBLIC int name parameters { BEGIN; return finish(__VA_ARGS__); }
#define STREAM_CALL(name, parameters, ...)                                                         \
    PUBLIC int name parameters { BEGIN_CONTEXT; FIND_STREAM(number); return finish(__VA_ARGS__); }
#define EVENT_CALL(name, parameters, ...)                                                          \
    PUBLIC int name parameters { BEGIN_CONTEXT; FIND_EVENT(number); return finish(__VA_ARGS__); }

/* Let others run while a host function does, which may take the interpreter's lock. */
void unlocked(void (*function)(void *), void *argument);

/* No call succeeds from now on. */
int lose(int status);
bool lost(void);
/* Where asynchronous errors show. */
int waited(void);
int take_last_error(bool reset);

/* Something compute-sanitizer would tell: counted, and a line of FAKE_CUDA_FINDINGS. */
void finding(const char *kind, const char *format, ...) PRINTF(2, 3);
const char *setting(const char *name, const char *otherwise);

/* Run it; false: it touched memory that is not there. */
bool survives(void (*function)(void *), void *argument, uint64_t *fault);

struct thread_state {
    int device;
    bool chosen, calling_back;
    int last_error;
};
extern _Thread_local struct thread_state thread;

/* --------------------------------------------------------------------------------- devices.c */

struct device {
    int index, part; /* of the host's devices; 1 or 2: a MIG device of it */
    unsigned char uuid[16];
    bool context;
    bool peers[MAX_DEVICES];
};

struct devices {
    int count;
    struct device at[MAX_DEVICES];
};
extern struct devices devices;

void read_devices(void);
bool has_driver(void);
bool is_device(int ordinal);
size_t device_bytes(void);
bool can_access_peer(int device, int peer);
/* Whether kernels on a device may touch memory of another. */
bool reaches(int device, int owner);
bool pins_read_only(void);

/* ---------------------------------------------------------------------------------- memory.c */

struct allocation {
    uint64_t base;
    size_t bytes;
    int device, fd;        /* fd -1: opened */
    unsigned char handle[64];
    int opened;            /* how often */
    bool alive;
};

struct host_memory {
    struct host_memory *next;
    uint64_t base;
    size_t bytes;
    unsigned flags;
    bool registered;       /* else allocated */
};
extern struct host_memory *host_memory;

struct allocation *find(uint64_t address);            /* alive or not */
struct allocation *find_alive(uint64_t address, size_t bytes);
struct allocation *find_opened(const unsigned char *handle);
struct host_memory *find_host(uint64_t address);
struct allocation *map_device(size_t bytes, int device, int fd);
void drop(struct allocation *found);
bool is_retired(uint64_t address);                    /* of before the last reset */
size_t used(int device);
int memory_new(uint64_t *address, size_t bytes);
int memory_free(uint64_t address);
int host_new(void **address, size_t bytes, unsigned flags);
int host_free(uint64_t address);
int host_pin(uint64_t address, size_t bytes, unsigned flags);
int host_unpin(uint64_t address);
void memory_leaks(void);
void memory_reset(void);

/* ------------------------------------------------------------------------------------- ipc.c */

int memory_handle(unsigned char *handle, uint64_t address);
int memory_open(uint64_t *address, const unsigned char *handle, unsigned flags);
int memory_close(uint64_t address);

/* --------------------------------------------------------------------------------- streams.c */

struct span {
    uint64_t address;
    size_t bytes;
    bool write;
};

typedef struct { uint64_t at[MAX_SLOTS]; } clock_vector;

struct op {
    struct op *next;
    uint64_t order;
    int (*run)(struct op *op);
    struct stream *stream;
    const char *what;
    uint64_t target, source;
    size_t bytes;
    int value;
    void *data;            /* freed with it */
    void (*function)(void *);
    void *argument;
};

/* Streams are not freed but used again: whoever waits for one may look at it after others have
 * destroyed it. RETIRED: of before the last reset. */
enum stream_state { UNUSED, LIVE, DESTROYED, RETIRED };

struct stream {
    struct stream *next;
    enum stream_state state;
    int device, slot, priority;
    unsigned flags;        /* 1: non-blocking */
    bool busy;
    struct op *first, *last;
    size_t count;
    clock_vector clock;
};

struct event {
    struct event *next;
    bool retired;
    unsigned flags;
    int device;
    struct stream *stream; /* recorded on */
    uint64_t order;        /* 0: not yet, or done */
    double time;
    clock_vector clock;
    struct shared_event *shared;
    int fd;
};

/* What processes see of an event that has a handle. */
struct shared_event {
    uint64_t recorded, done;
};

#define FOREVER UINT64_MAX

struct stream *stream_new(unsigned flags, int priority);
int stream_drop(struct stream *stream);
bool stream_retired(void *number);
struct stream *stream_of(void *number);               /* NULL: there is none */
struct op *op_new(const char *what, int (*run)(struct op *op));
/* Queues it; `spans` are what it touches. */
void enqueue(struct stream *stream, struct op *op, const struct span *spans, int count);
int run(struct stream *stream, uint64_t until);
void enqueue_wait(struct stream *stream, struct stream *other, uint64_t until);
void enqueue_between(struct stream *stream, struct op *op, const struct span *spans, int device);
int wait_stream(struct stream *stream, uint64_t until);
int wait_device(int device);
bool under_way(uint64_t address, size_t bytes);
void streams_leaks(void);
void streams_reset(void);

int standin_queue(const char *what, void (*function)(void *), void *argument,
                  const struct span *spans, int count, void *number);

/* ---------------------------------------------------------------------------------- events.c */

struct event *event_new(unsigned flags);
struct event *event_of(void *number);
bool event_retired(void *number);
int event_drop(struct event *event);
int event_record(struct event *event, struct stream *stream);
int event_wait(struct event *event, struct stream *stream);
int event_query(struct event *event);
int event_synchronize(struct event *event);
int event_elapsed(float *ms, struct event *start, struct event *end);
int event_handle(unsigned char *handle, struct event *event);
int event_open(struct event **event, const unsigned char *handle);
void events_leaks(void);
void events_reset(void);

/* ----------------------------------------------------------------------------------- races.c */

void race_access(struct stream *stream, const char *what, const struct span *spans, int count);
void race_join(clock_vector *target, const clock_vector *source);
/* The host has waited for all that this clock tells. */
void race_host_saw(const clock_vector *clock);
int race_slot(void);
void race_reset(void);

/* ---------------------------------------------------------------------------------- copies.c */

int copy(uint64_t target, uint64_t source, size_t bytes, int kind, struct stream *stream);
int fill(uint64_t target, int value, size_t bytes, struct stream *stream);

/* ---------------------------------------------------------------------------------- driver.c */

void modules_leaks(void);

/* ----------------------------------------------------------------------------------- calls.c */

int cudaRuntimeGetVersion(int *number);
