/* libshmserve: calls models of a shmserve server on the same host, through shared memory and lanes.
 *
 * Two files, shmserve.h and shmserve.c, are the whole library: C11, Linux, no dependencies (link with -pthread).
 *
 *     shmserve_client *client;                      // the connection, for all threads
 *     shmserve_lane *lane;                          // a lane to one model, for one thread at a time
 *     shmserve_connect(NULL, &client, &error);
 *     shmserve_lane_open(client, "echo", "", 0, &lane, &error);
 *     float *in = shmserve_alloc(client, 4096, &error), *out = shmserve_alloc(client, 4096, &error);
 *     int64_t shape[] = {1024};
 *     shmserve_tensor input = {"IN", SHMSERVE_FP32, 1, shape, in, 4096};
 *     shmserve_output output = {"OUT", out, 4096};
 *     shmserve_request request = {.inputs = &input, .input_count = 1, .outputs = &output, .output_count = 1};
 *     if (shmserve_infer(lane, &request, NULL, &error)) puts(error.text);
 *
 * Rules that hold everywhere:
 *
 * - Functions that can fail return a shmserve_code, SHMSERVE_OK (0) on success. `error` may be NULL; it is
 *   written on failure only.
 * - Structs that the caller fills must be zero where nothing is set ({0}, or designated initialisers). Zero
 *   means the default. `reserved` fields must be zero.
 * - Strings are UTF-8 (else INVALID_ARGUMENT) and end with NUL. NULL stands for "".
 * - Times are nanoseconds. Absolute times are of CLOCK_MONOTONIC.
 * - No call waits longer than its timeout, but shmserve_take may: see there. Of the functions without a timeout,
 *   shmserve_alloc and shmserve_renew wait for the server for 5 s at most; shmserve_free, shmserve_lane_close and
 *   shmserve_close for 0.2 s, to have it forget memory. The others do not wait. Large memory takes time to allocate.
 * - No call allocates memory once calls of its kind and size have been made before, except where a lane or shared
 *   memory has to be replaced (after restarts and time limits).
 * - A client belongs to the process that connected. In a child process after fork its functions fail with
 *   FAILED_PRECONDITION: connect in the child. shmserve_lane_close and shmserve_close give back what the child has of
 *   the parent's, and shmserve_free does nothing; the parent notices none of it.
 */
#ifndef SHMSERVE_H
#define SHMSERVE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define SHMSERVE_VERSION "0.2.0"

#define SHMSERVE_MAX_RANK 64      /* dimensions of a tensor */
#define SHMSERVE_MAX_TENSORS 256  /* inputs, outputs or parameters of a request */
#define SHMSERVE_MAX_UNDER_WAY 16 /* requests of one lane that wait for answers */
#define SHMSERVE_INLINE_BYTES 4096 /* tensors below this size may travel in the message */

#if defined(__GNUC__)
#define SHMSERVE_API __attribute__((visibility("default")))
#else
#define SHMSERVE_API
#endif

/* ------------------------------------------------------------------------------------------------ errors */

/* Kinds of failure: gRPC's status numbers. */
typedef enum shmserve_code {
    SHMSERVE_OK = 0,
    SHMSERVE_CANCELLED = 1,
    SHMSERVE_UNKNOWN = 2,
    SHMSERVE_INVALID_ARGUMENT = 3,    /* the request does not fit the model, or an argument is wrong */
    SHMSERVE_DEADLINE_EXCEEDED = 4,   /* the time is over; the model may still be running */
    SHMSERVE_NOT_FOUND = 5,           /* no such model, version or region */
    SHMSERVE_ALREADY_EXISTS = 6,
    SHMSERVE_PERMISSION_DENIED = 7,
    SHMSERVE_RESOURCE_EXHAUSTED = 8,  /* a limit of the server or of the library, or no memory is left */
    SHMSERVE_FAILED_PRECONDITION = 9, /* not allowed in this state, such as memory that must be renewed first */
    SHMSERVE_ABORTED = 10,            /* the executor died while it had the request: it may have run */
    SHMSERVE_UNIMPLEMENTED = 12,      /* the model has no lanes (ensembles, sequences, ...), or the server is too old */
    SHMSERVE_INTERNAL = 13,           /* the model failed */
    SHMSERVE_UNAVAILABLE = 14,        /* no server or no executor: nothing has run, a later call may succeed */
    SHMSERVE_PROTOCOL = 15,           /* the other end broke the protocol; the connection was dropped (gRPC: DATA_LOSS) */
    SHMSERVE_UNAUTHENTICATED = 16
} shmserve_code;

#define SHMSERVE_TEXT 512

/* A failure. `http_status`: the status that the server gave, as over HTTP; 0: the library found the failure.
 * `text`: a sentence for people, cut to fit. */
typedef struct shmserve_error {
    shmserve_code code;
    int http_status;
    char text[SHMSERVE_TEXT];
} shmserve_error;

/* Return the name of a code, such as "NOT_FOUND". */
SHMSERVE_API const char *shmserve_code_name(shmserve_code code);

/* Return the library's version, SHMSERVE_VERSION at the time when it was built. */
SHMSERVE_API const char *shmserve_version(void);

/* -------------------------------------------------------------------------------------------- connection */

/* The connection to a server: the client socket, a pool of shared memory, and a budget for looks.
 * Thread-safe: one per process and server is enough. */
typedef struct shmserve_client shmserve_client;

typedef struct shmserve_options {
    /* Path of the server's client socket. NULL: the environment's SHMSERVE_CLIENT_SOCKET, else client.sock in
     * the environment's SHMSERVE_RUN_DIR, in $XDG_RUNTIME_DIR/shmserve, /tmp/shmserve-UID or /run/shmserve.
     * A path that was not named must be served by this user, root, or the owner of /run/shmserve. */
    const char *path;
    int64_t timeout_ns;   /* longest wait for the connection; 0: 5 s */
    int64_t reconnect_ns; /* how long a call may wait for a server that restarts; 0: 3 s, -1: not at all */
    size_t max_bytes;     /* limit of the pool; 0: 1 GiB */
    /* Longest time, in microseconds, to poll for an answer before the thread sleeps, if the lane's last answer
     * came as soon; at most 1000. 0: 400, with at least two processors. -1: never. */
    int32_t look_us;
    uint32_t reserved_flags;
    uint64_t reserved[8];
} shmserve_options;

/* Connect to a server. `options` may be NULL. The connection comes back by itself after restarts.
 * UNAVAILABLE: no server listens. PERMISSION_DENIED: this user may not open the socket, or another user serves it. */
SHMSERVE_API shmserve_code shmserve_connect(const shmserve_options *options, shmserve_client **client,
                                            shmserve_error *error);

/* Close the connection and free all of its buffers. All lanes must have been closed. NULL is allowed. A server that
 * cannot be reached then keeps the buffers' memory until this process ends. */
SHMSERVE_API void shmserve_close(shmserve_client *client);

/* ------------------------------------------------------------------------------------------------ memory */

/* Return a buffer of shared memory of at least `nbytes` bytes, aligned to a page, or NULL. Contents are undefined.
 * Each buffer is one region of the server, at most 256 per client: allocate few, keep them, and use parts.
 * Inputs and outputs may lie anywhere in a buffer; several requests may use one at the same time. Freed buffers
 * are kept for later calls of about the same size, until others need the room. */
SHMSERVE_API void *shmserve_alloc(shmserve_client *client, size_t nbytes, shmserve_error *error);

/* Free a buffer. The requests that name it must have been answered. NULL is allowed. */
SHMSERVE_API void shmserve_free(shmserve_client *client, void *buffer);

/* Give a buffer new memory at the same address. Contents are lost. If that fails, the buffer is as it was.
 *
 * If a request fails with DEADLINE_EXCEEDED, ABORTED, CANCELLED or PROTOCOL before the server has answered, the
 * server may still write to its outputs. Their buffers are then closed to requests (FAILED_PRECONDITION), until
 * the late answer has come or the buffer is renewed. A request with an output at the buffer's start, and no input
 * there, renews the buffer by itself: loops with a buffer for each output need not call this. No other request may
 * be using the buffer. */
SHMSERVE_API shmserve_code shmserve_renew(shmserve_client *client, void *buffer, shmserve_error *error);

/* ----------------------------------------------------------------------------------------------- tensors */

typedef enum shmserve_datatype {
    SHMSERVE_NO_DATATYPE = 0, /* a datatype that this library does not know */
    SHMSERVE_BOOL = 1,        /* one byte, 0 or 1 */
    SHMSERVE_UINT8 = 2,
    SHMSERVE_UINT16 = 3,
    SHMSERVE_UINT32 = 4,
    SHMSERVE_UINT64 = 5,
    SHMSERVE_INT8 = 6,
    SHMSERVE_INT16 = 7,
    SHMSERVE_INT32 = 8,
    SHMSERVE_INT64 = 9,
    SHMSERVE_FP16 = 10,
    SHMSERVE_FP32 = 11,
    SHMSERVE_FP64 = 12,
    SHMSERVE_BYTES = 13, /* strings; see shmserve_bytes_encode */
    SHMSERVE_BF16 = 14
} shmserve_datatype;

/* Return the name of a datatype, such as "FP32"; "" for none. */
SHMSERVE_API const char *shmserve_datatype_name(shmserve_datatype datatype);

/* Return the datatype of a name; SHMSERVE_NO_DATATYPE if there is none. */
SHMSERVE_API shmserve_datatype shmserve_datatype_from_name(const char *name);

/* Return the bytes of an element; 0 for BYTES and SHMSERVE_NO_DATATYPE. */
SHMSERVE_API size_t shmserve_datatype_size(shmserve_datatype datatype);

/* A tensor: an input of a request, or an output of an answer. Elements are little-endian, row-major.
 *
 * Inputs: data in a buffer of shmserve_alloc is not copied. Other data is copied: into the message if smaller
 * than SHMSERVE_INLINE_BYTES, else into memory of the pool that the lane keeps. Data must not change until the
 * request has its last answer. */
typedef struct shmserve_tensor {
    const char *name;
    shmserve_datatype datatype;
    size_t rank;
    const int64_t *shape; /* `rank` dimensions */
    const void *data;
    size_t nbytes;
} shmserve_tensor;

/* A wanted output. `data`: where to write it, in a buffer of shmserve_alloc, with room for `nbytes` bytes; NULL:
 * the output comes in the answer, if smaller than SHMSERVE_INLINE_BYTES (all outputs together: 64 KiB). */
typedef struct shmserve_output {
    const char *name;
    void *data;
    size_t nbytes;
} shmserve_output;

/* An element of a BYTES tensor. */
typedef struct shmserve_bytes {
    const void *data;
    size_t size;
} shmserve_bytes;

/* Return the bytes that a BYTES tensor of these elements takes; 0 if an element is too long (4 GiB). */
SHMSERVE_API size_t shmserve_bytes_size(const shmserve_bytes *elements, size_t count);

/* Write the elements of a BYTES tensor, each after its length. Return the bytes written; 0 if `room` is too small
 * (or there are no elements). */
SHMSERVE_API size_t shmserve_bytes_encode(void *to, size_t room, const shmserve_bytes *elements, size_t count);

/* Read the element at `*offset` (at first 0) of a BYTES tensor, and move the offset to the next. Return false at
 * the end, and if the tensor is cut short. The element's data points into the tensor. */
SHMSERVE_API bool shmserve_bytes_next(const void *data, size_t nbytes, size_t *offset, shmserve_bytes *element);

/* -------------------------------------------------------------------------------------------- parameters */

typedef enum shmserve_kind {
    SHMSERVE_IS_BOOL = 0,
    SHMSERVE_IS_INT = 1,
    SHMSERVE_IS_DOUBLE = 2,
    SHMSERVE_IS_STRING = 3
} shmserve_kind;

/* A parameter of a request or of an answer. The kind tells which field of `value` holds. */
typedef struct shmserve_parameter {
    const char *name;
    shmserve_kind kind;
    union {
        bool boolean;
        int64_t integer;
        double number;
        const char *string;
    } value;
} shmserve_parameter;

/* ------------------------------------------------------------------------------------------------- model */

/* An input or output of a model. -1 in the shape: an open dimension. */
typedef struct shmserve_spec {
    const char *name;
    shmserve_datatype datatype;
    size_t rank;
    const int64_t *shape;
} shmserve_spec;

/* Description of a model's version. `decoupled`: requests have any number of answers. */
typedef struct shmserve_model {
    const char *name;
    const char *version;
    const shmserve_spec *inputs;
    size_t input_count;
    const shmserve_spec *outputs;
    size_t output_count;
    bool decoupled;
} shmserve_model;

/* Describe a model; version "": the newest. `*model` must be NULL or a former description, which is written anew.
 * `timeout_ns`: 0: 5 s. On failure `*model` stays as it was. NOT_FOUND, UNAVAILABLE: no such model, or not
 * ready. UNIMPLEMENTED: the server is too old. */
SHMSERVE_API shmserve_code shmserve_describe(shmserve_client *client, const char *name, const char *version,
                                             int64_t timeout_ns, shmserve_model **model, shmserve_error *error);

SHMSERVE_API void shmserve_model_free(shmserve_model *model);

/* ------------------------------------------------------------------------------------------------- lanes */

/* A lane to the executors of one model: up to SHMSERVE_MAX_UNDER_WAY requests under way. For one thread at a time:
 * open a lane per thread. When an executor ends, dies or restarts, the lane goes on with another by itself; requests
 * that come meanwhile wait until the lane's streams have ended. */
typedef struct shmserve_lane shmserve_lane;

/* Open a lane; version "": the newest at any time. `timeout_ns`: 0: 5 s. The client must live longer than the lane.
 * NOT_FOUND: no such model. UNIMPLEMENTED: the model, or the server, has no lanes. RESOURCE_EXHAUSTED: all lanes
 * are taken. UNAVAILABLE: the model does not run now. */
SHMSERVE_API shmserve_code shmserve_lane_open(shmserve_client *client, const char *model, const char *version,
                                              int64_t timeout_ns, shmserve_lane **lane, shmserve_error *error);

/* Close a lane, which cancels its requests; their outputs' buffers are as after CANCELLED (shmserve_renew). NULL is
 * allowed. */
SHMSERVE_API void shmserve_lane_close(shmserve_lane *lane);

/* Return the version of the model that answers on this lane now; and its instance. Valid until the next call. */
SHMSERVE_API const char *shmserve_lane_version(const shmserve_lane *lane);
SHMSERVE_API const char *shmserve_lane_instance(const shmserve_lane *lane);

typedef struct shmserve_request {
    const shmserve_tensor *inputs;
    size_t input_count;
    const shmserve_output *outputs; /* none: all outputs, in the answer */
    size_t output_count;
    const shmserve_parameter *parameters;
    size_t parameter_count;
    const char *id;      /* request id, for the server's logs and the model */
    int64_t timeout_ns;  /* longest wait for the (last) answer; 0: the server's limit; negative: it has passed */
    int64_t deadline_ns; /* absolute; 0: none. The earlier of both counts */
    /* Decoupled models: how many answers may be unread, 1 to 16; 1 if an output has a window. Else 0. */
    uint32_t credit;
    /* Decoupled models: the caller gives credit (shmserve_credit). false: an answer's credit is given by the next
     * shmserve_take. */
    bool hold_credit;
    void *user; /* repeated in the answers */
    uint64_t reserved[4];
} shmserve_request;

/* What a request has cost; of a stream: what the answer has cost. */
typedef struct shmserve_receipt {
    int64_t queue_ns;
    int64_t compute_ns;
    int64_t copied_in;     /* bytes that the executor copied: of inputs, */
    int64_t copied_batch;  /* for a batch, */
    int64_t copied_out;    /* of outputs, */
    int64_t copied_device; /* between host and GPU */
    int64_t inline_bytes;  /* bytes of tensors in messages */
} shmserve_receipt;

/* An answer. Valid, with all it points to, until the next call with the lane (shmserve_cancel excepted). */
typedef struct shmserve_answer {
    uint64_t ticket; /* of shmserve_submit */
    void *user;      /* of the request */
    shmserve_code code;
    int http_status;  /* the server's; 0: the library found the failure */
    const char *text; /* the failure's text; "" on success */
    bool final;       /* no further answer follows. A stream's final answer may have no outputs */
    uint32_t attempts; /* how often the request was sent: more than 1 after an executor ended or died */
    const shmserve_tensor *outputs; /* data in the caller's window, or in the answer (aligned to 64 bytes) */
    size_t output_count;
    const shmserve_parameter *parameters;
    size_t parameter_count;
    shmserve_receipt receipt;
    uint64_t reserved[4];
} shmserve_answer;

/* Run the model and wait for its answer. Return the answer's code. `answer` may be NULL, and is set to NULL if there
 * is none. FAILED_PRECONDITION: requests are under way (shmserve_submit). Decoupled models need shmserve_submit. */
SHMSERVE_API shmserve_code shmserve_infer(shmserve_lane *lane, const shmserve_request *request,
                                          const shmserve_answer **answer, shmserve_error *error);

/* Send a request; shmserve_take gives its answers. Waits only where the lane or memory has to be replaced, at most
 * until the request's deadline. `ticket` may be NULL; tickets are never 0. RESOURCE_EXHAUSTED: as many
 * requests are under way as may be. Requests that ended without the server's answer do not count: while the server
 * still has too many of them, this one waits for its turn within its time limit. */
SHMSERVE_API shmserve_code shmserve_submit(shmserve_lane *lane, const shmserve_request *request, uint64_t *ticket,
                                           shmserve_error *error);

/* Take the next answer of any request under way. `*answer` is NULL if none came within `timeout_ns` (0: do not wait;
 * -1: until there is one), or if no request is under way. It may wait up to 0.2 s while the lane is being replaced, and
 * up to 5 s to register memory that a restarted server has lost. A request's failure, also a deadline that has passed,
 * is an answer: the function itself fails only for wrong arguments. */
SHMSERVE_API shmserve_code shmserve_take(shmserve_lane *lane, int64_t timeout_ns, const shmserve_answer **answer,
                                         shmserve_error *error);

/* Give credit for answers of a request with `hold_credit` that have been taken: as many more may come. */
SHMSERVE_API shmserve_code shmserve_credit(shmserve_lane *lane, uint64_t ticket, uint32_t answers,
                                           shmserve_error *error);

/* Ask to end a request; 0: all requests under way. From any thread, also while another waits in shmserve_infer or
 * shmserve_take. The request is answered all the same, mostly with CANCELLED: when the model has ended it; where no
 * executor has it, at once, or within 0.05 s if another thread waits (5 s while that thread asks for a lane or memory).
 * Unknown tickets are ignored. */
SHMSERVE_API shmserve_code shmserve_cancel(shmserve_lane *lane, uint64_t ticket, shmserve_error *error);

/* Return the number of requests under way, whose final answer has not been taken. */
SHMSERVE_API size_t shmserve_under_way(const shmserve_lane *lane);

/* ------------------------------------------------------------------------------------------- event loops */

/* Return a descriptor that is readable when shmserve_take should be called; -1 if none is left. It stays the same for
 * the lane's life, and belongs to the lane. Call shmserve_take with timeout 0 until it gives no answer. */
SHMSERVE_API int shmserve_lane_fd(shmserve_lane *lane);

/* Return the milliseconds after which shmserve_take should be called although the descriptor is not readable, for
 * poll or epoll_wait: the next deadline, or attempt to send; 0: now; -1: never. */
SHMSERVE_API int shmserve_lane_poll_ms(const shmserve_lane *lane);

#ifdef __cplusplus
}
#endif

#endif
