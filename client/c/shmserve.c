/* libshmserve; shmserve.h describes the interface, docs/lane_wire.md the wire.
 *
 * Parts, in this order: errors and time, MessagePack, decoders of packets, sockets, the client socket, memory,
 * looks, requests, lanes. A client has two locks: `turn` for the client socket (one question at a time) and
 * `pool` for the table of blocks, which is never held while a thread waits. A lane's `guard` protects what
 * shmserve_cancel reads from other threads.
 *
 * Nothing that a peer sends is trusted: packets, arrays and texts are bounded, and so is the nesting of skipped
 * values, which takes no stack.
 */
#ifdef __cplusplus
#error "shmserve.c is C, which c++ takes for C++: compile it with cc -c, and link shmserve.o"
#endif
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "shmserve.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define MAX_PACKET ((size_t)128 * 1024)
#define STORE_BYTES ((size_t)256 * 1024)
#define MAX_BLOCKS 256
#define UNDER_WAY SHMSERVE_MAX_UNDER_WAY
#define CALLS (2 * UNDER_WAY) /* calls that were given up have room beside those under way */
#define MS INT64_C(1000000)
#define SECOND (1000 * MS)
#define NEVER INT64_MAX
#define ANSWER_NS (5 * SECOND) /* longest wait for a reply on the client socket */
#define PAUSE_NS (50 * MS)     /* between attempts to reach a server that restarts */
#define TRY_NS (200 * MS)      /* longest wait for the server where the caller wants to wait less */
#define GRACE_NS (5 * SECOND)  /* beyond the server's own limit, for the server's own error */
#define LATE_NS (1 * SECOND)   /* after which an executor that does not answer a cancelled request counts as stuck */

/* ---------------------------------------------------------------------------------------- errors and time */

static const struct {
    const char *name;
    int status;
} CODES[] = {
    [SHMSERVE_OK] = {"OK", 200}, [SHMSERVE_CANCELLED] = {"CANCELLED", 499}, [SHMSERVE_UNKNOWN] = {"UNKNOWN", 500},
    [SHMSERVE_INVALID_ARGUMENT] = {"INVALID_ARGUMENT", 400},
    [SHMSERVE_DEADLINE_EXCEEDED] = {"DEADLINE_EXCEEDED", 504}, [SHMSERVE_NOT_FOUND] = {"NOT_FOUND", 404},
    [SHMSERVE_ALREADY_EXISTS] = {"ALREADY_EXISTS", 400}, [SHMSERVE_PERMISSION_DENIED] = {"PERMISSION_DENIED", 403},
    [SHMSERVE_RESOURCE_EXHAUSTED] = {"RESOURCE_EXHAUSTED", 503},
    [SHMSERVE_FAILED_PRECONDITION] = {"FAILED_PRECONDITION", 400}, [SHMSERVE_ABORTED] = {"ABORTED", 502},
    [SHMSERVE_UNIMPLEMENTED] = {"UNIMPLEMENTED", 501}, [SHMSERVE_INTERNAL] = {"INTERNAL", 500},
    [SHMSERVE_UNAVAILABLE] = {"UNAVAILABLE", 503}, [SHMSERVE_PROTOCOL] = {"PROTOCOL", 502},
    [SHMSERVE_UNAUTHENTICATED] = {"UNAUTHENTICATED", 401},
};
#define CODE_COUNT (sizeof CODES / sizeof *CODES)

static const char DIED[] = "the executor died while it had the request";
static const char NOT_UTF8[] = "a name or another text is not UTF-8";
static const char LATE[] = "the server did not answer in time";

const char *shmserve_code_name(shmserve_code code) {
    return (size_t)code < CODE_COUNT && CODES[code].name ? CODES[code].name : "UNKNOWN";
}

const char *shmserve_version(void) { return SHMSERVE_VERSION; }

static shmserve_code code_from_name(const char *name) {
    for (size_t i = 0; i < CODE_COUNT; i++)
        if (CODES[i].name && !strcmp(CODES[i].name, name)) return (shmserve_code)i;
    return SHMSERVE_UNKNOWN;
}

/* Cut a text before its end, where no character is divided. */
static void end_text(char *text, size_t length) {
    while (length && ((unsigned char)text[length] & 0xc0) == 0x80) length--;
    text[length] = 0;
}

__attribute__((format(printf, 3, 4))) static shmserve_code fail(shmserve_error *error, shmserve_code code,
                                                                const char *format, ...) {
    if (!error) return code;
    va_list values;
    va_start(values, format);
    char text[SHMSERVE_TEXT + 4];
    int length = vsnprintf(text, sizeof text, format, values);
    va_end(values);
    if (length >= SHMSERVE_TEXT) end_text(text, SHMSERVE_TEXT - 1);
    error->code = code;
    error->http_status = 0;
    memcpy(error->text, text, strlen(text) + 1);
    return code;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * SECOND + now.tv_nsec;
}

static int64_t earlier(int64_t a, int64_t b) { return a < b ? a : b; }

/* Return the time `ns` from `now`, at most NEVER. */
static int64_t after(int64_t now, int64_t ns) { return ns > NEVER - now ? NEVER : now + ns; }

/* Return the end of a wait; 0: the usual time. */
static int64_t limit(int64_t timeout_ns) { return after(now_ns(), timeout_ns ? timeout_ns : ANSWER_NS); }

static struct timespec timespec_of(int64_t ns) {
    return (struct timespec){.tv_sec = (time_t)(ns / SECOND), .tv_nsec = (long)(ns % SECOND)};
}

/* --------------------------------------------------------------------------------------------- datatypes */

static const struct {
    char name[8];
    size_t size;
} DATATYPES[] = {
    {"", 0},      {"BOOL", 1},  {"UINT8", 1}, {"UINT16", 2}, {"UINT32", 4}, {"UINT64", 8}, {"INT8", 1}, {"INT16", 2},
    {"INT32", 4}, {"INT64", 8}, {"FP16", 2},  {"FP32", 4},   {"FP64", 8},   {"BYTES", 0},  {"BF16", 2},
};
#define DATATYPE_COUNT (sizeof DATATYPES / sizeof *DATATYPES)

const char *shmserve_datatype_name(shmserve_datatype datatype) {
    return (size_t)datatype < DATATYPE_COUNT ? DATATYPES[datatype].name : "";
}

shmserve_datatype shmserve_datatype_from_name(const char *name) {
    for (size_t i = 1; name && i < DATATYPE_COUNT; i++)
        if (!strcmp(DATATYPES[i].name, name)) return (shmserve_datatype)i;
    return SHMSERVE_NO_DATATYPE;
}

size_t shmserve_datatype_size(shmserve_datatype datatype) {
    return (size_t)datatype < DATATYPE_COUNT ? DATATYPES[datatype].size : 0;
}

size_t shmserve_bytes_size(const shmserve_bytes *elements, size_t count) {
    size_t total = 0;
    for (size_t i = 0; i < count; i++) {
        if (elements[i].size > UINT32_MAX || elements[i].size > SIZE_MAX - 4 - total) return 0;
        total += 4 + elements[i].size;
    }
    return total;
}

size_t shmserve_bytes_encode(void *to, size_t room, const shmserve_bytes *elements, size_t count) {
    size_t total = shmserve_bytes_size(elements, count);
    if (!total || total > room) return 0;
    uint8_t *at = to;
    for (size_t i = 0; i < count; i++) {
        size_t size = elements[i].size;
        for (int shift = 0; shift < 32; shift += 8) *at++ = (uint8_t)(size >> shift);
        if (size) memcpy(at, elements[i].data, size);
        at += size;
    }
    return total;
}

bool shmserve_bytes_next(const void *data, size_t nbytes, size_t *offset, shmserve_bytes *element) {
    const uint8_t *bytes = data;
    if (*offset >= nbytes || nbytes - *offset < 4) return false;
    uint8_t length[4]; /* read once: the memory may be shared with a writer */
    memcpy(length, bytes + *offset, 4);
    size_t size = (size_t)length[0] | (size_t)length[1] << 8 | (size_t)length[2] << 16 | (size_t)length[3] << 24;
    if (size > nbytes - *offset - 4) return false;
    *element = (shmserve_bytes){bytes + *offset + 4, size};
    *offset += 4 + size;
    return true;
}

/* Return the bytes of a tensor of this shape that begins at `data` with room for `room` bytes; SIZE_MAX if there is no
 * such tensor there. */
static size_t tensor_bytes(const shmserve_tensor *tensor, const void *data, size_t room) {
    uint64_t count = 1;
    for (size_t i = 0; i < tensor->rank; i++) {
        if (tensor->shape[i] < 0) return SIZE_MAX;
        if (__builtin_mul_overflow(count, (uint64_t)tensor->shape[i], &count)) return SIZE_MAX;
    }
    if (tensor->datatype == SHMSERVE_BYTES) {
        size_t offset = 0;
        shmserve_bytes element;
        for (; count; count--)
            if (!shmserve_bytes_next(data, room, &offset, &element)) return SIZE_MAX;
        return offset;
    }
    size_t size = shmserve_datatype_size(tensor->datatype), total;
    if (!size || count > SIZE_MAX || __builtin_mul_overflow((size_t)count, size, &total)) return SIZE_MAX;
    return total <= room ? total : SIZE_MAX;
}

/* --------------------------------------------------------------------------------------- MessagePack: writing */

typedef struct {
    uint8_t *start, *at, *end;
    bool full; /* what was written did not fit */
    bool not_utf8; /* a text was not, and the server would end the connection */
} Writer;

static void put(Writer *w, const void *bytes, size_t count) {
    if (count > (size_t)(w->end - w->at)) {
        w->full = true;
        return;
    }
    if (count) memcpy(w->at, bytes, count);
    w->at += count;
}

static void put_tag(Writer *w, unsigned tag, uint64_t value, unsigned width) {
    uint8_t bytes[9] = {(uint8_t)tag};
    for (unsigned i = 0; i < width; i++) bytes[1 + i] = (uint8_t)(value >> 8 * (width - 1 - i));
    put(w, bytes, 1 + width);
}

static void put_array(Writer *w, size_t items) {
    if (items < 16) put_tag(w, 0x90u | (unsigned)items, 0, 0);
    else put_tag(w, 0xdc, items, 2);
}

static void put_uint(Writer *w, uint64_t value) {
    if (value < 128) put_tag(w, (unsigned)value, 0, 0);
    else if (value <= UINT32_MAX) put_tag(w, 0xce, value, 4);
    else put_tag(w, 0xcf, value, 8);
}

static void put_int(Writer *w, int64_t value) {
    if (value >= 0) put_uint(w, (uint64_t)value);
    else put_tag(w, 0xd3, (uint64_t)value, 8);
}

static bool is_utf8(const char *text) {
    /* the least number that is written in so many bytes */
    static const uint32_t LEAST[] = {0, 0, 0x80, 0x800, 0x10000};
    for (const uint8_t *at = (const uint8_t *)text; *at;) {
        unsigned width = *at < 0x80 ? 1 : *at >= 0xf0 ? 4 : *at >= 0xe0 ? 3 : 2;
        if (*at >= 0xf8 || (*at >= 0x80 && *at < 0xc0)) return false;
        uint32_t number = width == 1 ? *at : *at & (0x7fu >> width);
        at++;
        for (unsigned i = 1; i < width; i++, at++) {
            if ((*at & 0xc0) != 0x80) return false;
            number = number << 6 | (*at & 0x3f);
        }
        if (number < LEAST[width] || number > 0x10ffff || (number >= 0xd800 && number < 0xe000)) return false;
    }
    return true;
}

static void put_text(Writer *w, const char *text) {
    size_t length = text ? strlen(text) : 0;
    if (length && !is_utf8(text)) w->not_utf8 = true;
    if (length < 32) put_tag(w, 0xa0u | (unsigned)length, 0, 0);
    else put_tag(w, 0xdb, length > UINT32_MAX ? UINT32_MAX : length, 4);
    put(w, text, length);
}

static void put_bytes(Writer *w, const void *bytes, size_t count) {
    put_tag(w, 0xc5, count, 2); /* always below SHMSERVE_INLINE_BYTES */
    put(w, bytes, count);
}

static Writer writer(uint8_t *bytes, size_t room) { return (Writer){bytes, bytes, bytes + room, false, false}; }

static size_t written(const Writer *w) { return (size_t)(w->at - w->start); }

/* --------------------------------------------------------------------------------------- MessagePack: reading */

typedef struct {
    const uint8_t *at, *end;
    bool bad;
} Reader;

/* Kinds of values. Lengths and integers come as `value`; NEGATIVE ones in two's complement. */
typedef enum { BAD, NIL, BOOLEAN, UNSIGNED, NEGATIVE, FLOAT32, FLOAT64, TEXT, BINARY, ARRAY, MAP } Kind;

static uint64_t take_raw(Reader *r, unsigned width) {
    uint64_t value = 0;
    if ((size_t)(r->end - r->at) < width) {
        r->bad = true;
        r->at = r->end;
        return 0;
    }
    while (width--) value = value << 8 | *r->at++;
    return value;
}

static Kind bad(Reader *r) {
    r->bad = true;
    r->at = r->end;
    return BAD;
}

static Kind signed_kind(uint64_t *value, unsigned width) {
    unsigned shift = 64 - 8 * width;
    int64_t number = (int64_t)(*value << shift) >> shift;
    *value = (uint64_t)number;
    return number < 0 ? NEGATIVE : UNSIGNED;
}

/* Read a value's head. Texts, arrays and maps that are longer than the packet are BAD. */
static Kind head(Reader *r, uint64_t *value) {
    static const uint8_t KINDS[32] = {
        /* c0 */ NIL,      BAD,      BOOLEAN,  BOOLEAN,  BINARY,  BINARY,  BINARY,   BAD,
        /* c8 */ BAD,      BAD,      FLOAT32,  FLOAT64,  UNSIGNED, UNSIGNED, UNSIGNED, UNSIGNED,
        /* d0 */ NEGATIVE, NEGATIVE, NEGATIVE, NEGATIVE, BAD,     BAD,     BAD,      BAD,
        /* d8 */ BAD,      TEXT,     TEXT,     TEXT,     ARRAY,   ARRAY,   MAP,      MAP,
    };
    static const uint8_t WIDTHS[32] = {0, 0, 0, 0, 1, 2, 4, 0, 0, 0, 4, 8, 1, 2, 4, 8,
                                       1, 2, 4, 8, 0, 0, 0, 0, 0, 1, 2, 4, 2, 4, 2, 4};
    *value = 0;
    unsigned tag = (unsigned)take_raw(r, 1);
    Kind kind;
    if (r->bad) return BAD;
    if (tag < 0x80) return *value = tag, UNSIGNED;
    if (tag >= 0xe0) return *value = tag | ~UINT64_C(0xff), NEGATIVE;
    if (tag < 0x90) *value = tag & 15, kind = MAP;
    else if (tag < 0xa0) *value = tag & 15, kind = ARRAY;
    else if (tag < 0xc0) *value = tag & 31, kind = TEXT;
    else {
        unsigned width = WIDTHS[tag - 0xc0];
        kind = (Kind)KINDS[tag - 0xc0];
        *value = kind == BOOLEAN ? tag & 1 : take_raw(r, width);
        if (r->bad || kind == BAD) return bad(r);
        if (kind == NEGATIVE) return signed_kind(value, width);
    }
    uint64_t left = (uint64_t)(r->end - r->at);
    if (kind >= TEXT && (kind == MAP ? *value > left / 2 : *value > left)) return bad(r);
    return kind;
}

static void skip(Reader *r) {
    for (uint64_t values = 1, value; values && !r->bad; values--) {
        Kind kind = head(r, &value);
        if (kind == TEXT || kind == BINARY) r->at += value;
        if (kind == ARRAY) values += value;
        if (kind == MAP) values += 2 * value;
    }
}

static uint64_t take_kind(Reader *r, Kind wanted) {
    uint64_t value;
    if (head(r, &value) != wanted) bad(r), value = 0;
    return value;
}

static bool take_bool(Reader *r) { return take_kind(r, BOOLEAN) != 0; }

static int64_t take_int(Reader *r) {
    uint64_t value;
    Kind kind = head(r, &value);
    if (kind != NEGATIVE && (kind != UNSIGNED || value > INT64_MAX)) bad(r), value = 0;
    return (int64_t)value;
}

/* Return the number of items of an array, at most `limit`. */
static size_t take_array(Reader *r, size_t limit) {
    uint64_t items = take_kind(r, ARRAY);
    if (items > limit) bad(r), items = 0;
    return (size_t)items;
}

/* ------------------------------------------------------------------------------------------------ decoders */

/* What was decoded of one packet, until the next. */
typedef struct {
    size_t used;
    _Alignas(64) uint8_t bytes[STORE_BYTES];
} Store;

static void *store_take(Store *store, Reader *r, size_t count, size_t alignment) {
    size_t start = (store->used + alignment - 1) & ~(alignment - 1);
    if (r->bad || start > STORE_BYTES || count > STORE_BYTES - start) return bad(r), NULL;
    store->used = start + count;
    return store->bytes + start;
}

/* Copy a text to the store. Return "" from a bad packet. Texts have no NUL. */
static const char *take_text(Reader *r, Store *store) {
    size_t length = (size_t)take_kind(r, TEXT);
    char *text = store_take(store, r, length + 1, 1);
    if (!text || memchr(r->at, 0, length)) return bad(r), "";
    memcpy(text, r->at, length);
    text[length] = 0;
    r->at += length;
    return text;
}

static const int64_t *take_shape(Reader *r, Store *store, size_t *rank, int64_t least) {
    *rank = take_array(r, SHMSERVE_MAX_RANK);
    int64_t *shape = store_take(store, r, (*rank + 1) * sizeof *shape, sizeof *shape);
    for (size_t i = 0; shape && i < *rank; i++) {
        shape[i] = take_int(r);
        if (shape[i] < least) bad(r);
    }
    if (r->bad) *rank = 0;
    return shape;
}

typedef struct {
    uint64_t number;
    int status;
    shmserve_code code;
    const char *text;
    bool final, moved;
    shmserve_receipt receipt;
    size_t output_count, parameter_count;
    shmserve_tensor outputs[SHMSERVE_MAX_TENSORS]; /* `data` is NULL: in the requested window */
    shmserve_parameter parameters[SHMSERVE_MAX_TENSORS];
    Store store;
} Decoded;

static void take_output(Reader *r, Decoded *d, shmserve_tensor *output) {
    size_t items = take_array(r, MAX_PACKET);
    if (items < 4) bad(r);
    output->name = take_text(r, &d->store);
    output->datatype = shmserve_datatype_from_name(take_text(r, &d->store));
    output->shape = take_shape(r, &d->store, &output->rank, 0);
    output->data = NULL;
    output->nbytes = 0;
    uint64_t length;
    Kind kind = head(r, &length);
    if (kind == BINARY) {
        void *data = store_take(&d->store, r, (size_t)length, 64);
        if (!data) return;
        if (length) memcpy(data, r->at, (size_t)length);
        r->at += length;
        output->data = data;
        output->nbytes = (size_t)length;
        if (tensor_bytes(output, data, output->nbytes) != output->nbytes) bad(r);
    } else if (kind != NIL) bad(r);
    for (; items > 4 && !r->bad; items--) skip(r);
}

static void take_parameter(Reader *r, Decoded *d, shmserve_parameter *parameter) {
    parameter->name = take_text(r, &d->store);
    const uint8_t *start = r->at;
    uint64_t value;
    uint32_t single;
    float number;
    memset(&parameter->value, 0, sizeof parameter->value);
    switch (head(r, &value)) {
    case BOOLEAN: parameter->kind = SHMSERVE_IS_BOOL, parameter->value.boolean = value != 0; break;
    case UNSIGNED:
        if (value > INT64_MAX) value = INT64_MAX; /* no parameter of this kind holds more */
        /* fall through */
    case NEGATIVE: parameter->kind = SHMSERVE_IS_INT, parameter->value.integer = (int64_t)value; break;
    case FLOAT32:
        single = (uint32_t)value;
        memcpy(&number, &single, sizeof number);
        parameter->kind = SHMSERVE_IS_DOUBLE, parameter->value.number = (double)number;
        break;
    case FLOAT64:
        parameter->kind = SHMSERVE_IS_DOUBLE;
        memcpy(&parameter->value.number, &value, sizeof value);
        break;
    case TEXT:
        r->at = start;
        parameter->kind = SHMSERVE_IS_STRING, parameter->value.string = take_text(r, &d->store);
        break;
    default: bad(r);
    }
}

static void take_receipt(Reader *r, shmserve_receipt *receipt) {
    int64_t *const fields[] = {&receipt->queue_ns,   &receipt->compute_ns,    &receipt->copied_in,   &receipt->copied_batch,
                               &receipt->copied_out, &receipt->copied_device, &receipt->inline_bytes};
    size_t items = take_array(r, MAX_PACKET);
    for (size_t i = 0; i < items && !r->bad; i++)
        if (i < sizeof fields / sizeof *fields) *fields[i] = take_int(r);
        else skip(r);
}

/* Read a message's name. Return the number of fields that follow, or SIZE_MAX for another message. */
static size_t take_name(Reader *r, const char *name) {
    Reader copy = *r;
    size_t items = take_array(&copy, MAX_PACKET), length = (size_t)take_kind(&copy, TEXT);
    if (copy.bad || !items || length != strlen(name) || memcmp(copy.at, name, length)) return SIZE_MAX;
    copy.at += length;
    *r = copy;
    return items - 1;
}

/* Decode a LaneAnswer. Return false if the packet is no such message. */
static bool decode_answer(const uint8_t *packet, size_t size, Decoded *d) {
    Reader reader = {packet, packet + size, false}, *r = &reader;
    size_t items = take_name(r, "LaneAnswer");
    if (items == SIZE_MAX || !items) return false;
    d->number = 0, d->status = 200, d->code = SHMSERVE_OK, d->text = "", d->final = true, d->moved = false;
    d->output_count = d->parameter_count = d->store.used = 0;
    memset(&d->receipt, 0, sizeof d->receipt);
    int64_t status = 200;
    const char *code = "";
    for (size_t field = 0; field < items && !r->bad; field++) {
        switch (field) {
        case 0: d->number = take_kind(r, UNSIGNED); break;
        case 1:
            d->output_count = take_array(r, SHMSERVE_MAX_TENSORS);
            for (size_t i = 0; i < d->output_count && !r->bad; i++) take_output(r, d, &d->outputs[i]);
            break;
        case 2: status = take_int(r); break;
        case 3: code = take_text(r, &d->store); break;
        case 4: d->text = take_text(r, &d->store); break;
        case 5:
            d->parameter_count = (size_t)take_kind(r, MAP);
            if (d->parameter_count > SHMSERVE_MAX_TENSORS) bad(r);
            for (size_t i = 0; i < d->parameter_count && !r->bad; i++) take_parameter(r, d, &d->parameters[i]);
            break;
        case 6: take_receipt(r, &d->receipt); break;
        case 7: d->final = take_bool(r); break;
        case 8: d->moved = take_bool(r); break;
        default: skip(r);
        }
    }
    if (r->bad || r->at != r->end || status < 100 || status > 599) return false;
    d->status = (int)status;
    if (status != 200) {
        d->code = code_from_name(code);
        if (d->code == SHMSERVE_OK) d->code = SHMSERVE_UNKNOWN;
        d->output_count = 0;
    }
    return true;
}

/* A description, which is written into one half while the other is in use. */
typedef struct {
    shmserve_model described; /* first: the caller's pointer leads here */
    int half;
    struct Half {
        shmserve_spec specs[2][SHMSERVE_MAX_TENSORS];
        Store store;
    } halves[2];
} Model;

/* Decode the fields of a ModelDescribed. Return false, and leave the description, if they are malformed. */
static bool decode_model(Reader *r, size_t items, const char *name, Model *model) {
    struct Half *half = &model->halves[!model->half];
    half->store.used = 0;
    shmserve_model described = {0};
    size_t counts[2] = {0}, length = strlen(name) + 1;
    char *copy = store_take(&half->store, r, length, 1);
    if (items < 4 || !copy) return false;
    described.name = memcpy(copy, name, length);
    described.version = take_text(r, &half->store);
    for (int side = 0; side < 2; side++) {
        counts[side] = take_array(r, SHMSERVE_MAX_TENSORS);
        for (size_t i = 0; i < counts[side] && !r->bad; i++) {
            shmserve_spec *spec = &half->specs[side][i];
            size_t fields = take_array(r, MAX_PACKET);
            if (fields < 3) bad(r);
            spec->name = take_text(r, &half->store);
            spec->datatype = shmserve_datatype_from_name(take_text(r, &half->store));
            spec->shape = take_shape(r, &half->store, &spec->rank, -1);
            for (; fields > 3 && !r->bad; fields--) skip(r);
        }
    }
    described.decoupled = take_bool(r);
    for (; items > 4 && !r->bad; items--) skip(r);
    if (r->bad || r->at != r->end) return false;
    described.inputs = half->specs[0], described.input_count = counts[0];
    described.outputs = half->specs[1], described.output_count = counts[1];
    model->described = described;
    model->half = !model->half;
    return true;
}

typedef struct {
    char version[64], instance[128];
    bool rerun;
    int64_t timeout_ns;
} Opened;

static void take_short(Reader *r, char *text, size_t room) {
    size_t length = (size_t)take_kind(r, TEXT);
    if (r->bad) length = 0;
    size_t kept = length < room - 1 ? length : room - 1;
    memcpy(text, r->at, kept);
    text[kept] = 0;
    r->at += length;
}

/* Decode the fields of a LaneOpened. */
static bool decode_opened(Reader *r, size_t items, Opened *opened) {
    if (items < 4) return false;
    take_short(r, opened->version, sizeof opened->version);
    take_short(r, opened->instance, sizeof opened->instance);
    opened->rerun = take_bool(r);
    opened->timeout_ns = take_int(r);
    for (; items > 4 && !r->bad; items--) skip(r);
    return !r->bad && r->at == r->end && opened->timeout_ns > 0;
}

/* ------------------------------------------------------------------------------------------------- sockets */

/* Wait for a descriptor, at most until `until`. Return true if it is ready, or has failed. */
static bool wait_for(int fd, short events, int64_t until) {
    struct pollfd one = {.fd = fd, .events = events, .revents = 0};
    for (;;) {
        int64_t left = until == NEVER ? 3600 * SECOND : until - now_ns();
        struct timespec time = timespec_of(left > 0 ? left : 0);
        int ready = ppoll(&one, fd >= 0, &time, NULL);
        if (ready > 0) return true;
        if (ready < 0 && errno != EINTR) return true;
        if (left <= 0) return false;
    }
}

/* NO_FD: the packet had a descriptor, for which this process had no room. */
typedef enum { DONE, TIMEOUT, GONE, VIOLATION, NO_FD } Outcome;

/* Send a packet, with a descriptor unless `fd` is negative. */
static Outcome send_packet(int sock, const void *packet, size_t size, int fd, int64_t until) {
    struct iovec part = {(void *)(uintptr_t)packet, size};
    union {
        struct cmsghdr align;
        uint8_t bytes[CMSG_SPACE(sizeof(int))];
    } control = {.bytes = {0}};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = control.bytes, message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
        rights->cmsg_level = SOL_SOCKET, rights->cmsg_type = SCM_RIGHTS, rights->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    }
    for (;;) {
        ssize_t sent = fd >= 0 ? sendmsg(sock, &message, MSG_NOSIGNAL | MSG_DONTWAIT)
                               : send(sock, packet, size, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (sent >= 0) return DONE;
        if (errno == EINTR) continue;
        if (errno != EAGAIN && errno != ENOBUFS) return GONE;
        bool full = errno == EAGAIN; /* else the kernel lacks memory, while the socket has room */
        if (full ? !wait_for(sock, POLLOUT, until) : now_ns() >= until) return TIMEOUT;
        if (!full) wait_for(-1, 0, earlier(until, now_ns() + MS));
    }
}

/* Receive a packet if there is one. TIMEOUT: there is none. Descriptors are closed unseen. */
static Outcome receive_now(int sock, uint8_t *packet, size_t *size) {
    for (bool again = false;;) {
        ssize_t got = recv(sock, packet, MAX_PACKET, MSG_DONTWAIT | MSG_TRUNC);
        *size = got > 0 ? (size_t)got : 0;
        if (got > (ssize_t)MAX_PACKET) return VIOLATION;
        if (got > 0) return DONE;
        if (got < 0 && errno == EINTR) continue;
        if (got < 0 && errno == EAGAIN) return TIMEOUT;
        /* The peer closed with packets unread: Linux says so once, before the peer's last packets. */
        if (got == 0 || errno != ECONNRESET || again) return GONE;
        again = true;
    }
}

/* Receive a packet until `until`. `fd` gets the descriptor of a packet that has exactly one, else -1. */
static Outcome receive_with_fd(int sock, uint8_t *packet, size_t *size, int *fd, int64_t until) {
    struct iovec part = {packet, MAX_PACKET};
    union {
        struct cmsghdr align;
        uint8_t bytes[CMSG_SPACE(4 * sizeof(int))];
    } control = {.bytes = {0}};
    *fd = -1;
    for (;;) {
        if (!wait_for(sock, POLLIN, until)) return TIMEOUT;
        struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
        message.msg_control = control.bytes, message.msg_controllen = sizeof control.bytes;
        ssize_t got = recvmsg(sock, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
        if (got < 0 && (errno == EINTR || errno == EAGAIN)) continue;
        if (got < 0) return GONE;
        int fds[4], count = 0;
        for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c)) {
            if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS) continue;
            size_t bytes = c->cmsg_len - CMSG_LEN(0);
            for (size_t i = 0; i + sizeof(int) <= bytes && count < 4; i += sizeof(int))
                memcpy(&fds[count++], CMSG_DATA(c) + i, sizeof(int));
        }
        bool broken = got == 0 || (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC));
        bool no_room = count < 4 && message.msg_flags & MSG_CTRUNC; /* of the process, not of `control` */
        if (count == 1 && !broken) *fd = fds[0];
        else
            while (count) close(fds[--count]);
        *size = (size_t)got;
        return !broken ? DONE : got == 0 ? GONE : no_room ? NO_FD : VIOLATION;
    }
}

/* Return zeroed memory, of which only touched pages exist; NULL if none is left. */
static void *new_pages(size_t size, shmserve_error *error) {
    void *pages = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (pages != MAP_FAILED) return pages;
    fail(error, SHMSERVE_RESOURCE_EXHAUSTED, "no memory is left");
    return NULL;
}

static bool is_seqpacket(int fd) {
    int type = 0, domain = 0;
    socklen_t size = sizeof type;
    return !getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) && type == SOCK_SEQPACKET &&
           !getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) && domain == AF_UNIX;
}

/* ------------------------------------------------------------------------------------------- the client socket */

typedef struct {
    uint8_t *address; /* NULL: the entry is free */
    size_t size;
    int fd;
    char name[64];      /* region */
    uint32_t generation; /* changes with the memory */
    unsigned live;      /* unanswered requests that name the block */
    unsigned late;      /* requests that were given up, and may still write here */
    bool listed;        /* in `order` */
    bool used;          /* allocated */
    bool stained;       /* somebody may still write here */
} Block;

struct shmserve_client {
    pid_t owner; /* a forked child leaves all that it has a copy of to its parent */
    char path[sizeof((struct sockaddr_un *)0)->sun_path];
    bool any_owner;
    uid_t owners[3];
    int64_t reconnect_ns;
    size_t max_bytes;
    int64_t look_ns;
    int look_limit;     /* threads that may look at a time */
    atomic_int looking;

    pthread_mutex_t turn; /* protects `asking`; who has set it owns the fields up to `packet` */
    pthread_cond_t turn_over;
    bool asking;
    int control; /* -1: not connected */
    bool has_lanes, has_models; /* the server knows OpenLane, DescribeModel */
    bool was_sent; /* the last question has left, and perhaps its effect is there */
    int64_t patience_ns; /* 0 after a failure, until the server answers again: calls do not wait for it */
    uint8_t packet[MAX_PACKET];

    pthread_mutex_t pool; /* protects the fields below */
    char prefix[40];
    unsigned region_count;
    size_t total_bytes;
    Block blocks[MAX_BLOCKS];
    uint16_t order[MAX_BLOCKS]; /* listed blocks, by address */
    size_t order_count;
    /* Regions that the server may still have of memory that is gone. Each connection, and so each registration, begins
     * by unregistering them: there are at most those of all blocks, and of the registrations of one turn. */
    char unwanted[2 * MAX_BLOCKS][64];
    size_t unwanted_count;
};

/* Return FAILED_PRECONDITION in a child process of the client's. Takes no lock: a thread of the parent may have it. */
static shmserve_code owned(const shmserve_client *client, shmserve_error *error) {
    if (client->owner == getpid()) return SHMSERVE_OK;
    return fail(error, SHMSERVE_FAILED_PRECONDITION, "the client belongs to another process: connect in the child after fork");
}

static shmserve_code begin_turn(shmserve_client *client, int64_t until, shmserve_error *error) {
    struct timespec time = timespec_of(until);
    pthread_mutex_lock(&client->turn);
    int late = 0;
    while (client->asking && !late) late = pthread_cond_timedwait(&client->turn_over, &client->turn, &time);
    bool mine = !client->asking;
    client->asking = true;
    pthread_mutex_unlock(&client->turn);
    if (mine) return SHMSERVE_OK;
    return fail(error, SHMSERVE_DEADLINE_EXCEEDED, "other threads are still asking the server");
}

static void end_turn(shmserve_client *client) {
    pthread_mutex_lock(&client->turn);
    client->asking = false;
    pthread_cond_signal(&client->turn_over);
    pthread_mutex_unlock(&client->turn);
}

static shmserve_code outcome_failed(shmserve_error *error, Outcome outcome) {
    if (outcome == TIMEOUT) return fail(error, SHMSERVE_DEADLINE_EXCEEDED, "%s", LATE);
    if (outcome == VIOLATION) return fail(error, SHMSERVE_PROTOCOL, "the server's reply is malformed");
    if (outcome == NO_FD) return fail(error, SHMSERVE_RESOURCE_EXHAUSTED, "no descriptor is left for what the server sends");
    return fail(error, SHMSERVE_UNAVAILABLE, "the server has closed the connection");
}

static void close_fd(int fd) {
    if (fd >= 0) close(fd);
}

/* End a connection, also where a child process has a copy of the socket. */
static void end_socket(int sock) {
    if (sock >= 0) shutdown(sock, SHUT_RDWR);
    close_fd(sock);
}

static void disconnect(shmserve_client *client) {
    end_socket(client->control);
    client->control = -1;
}

/* Ask once, over the connection as it is. `reader` stands behind the reply's name; `items`: its fields. */
static shmserve_code converse(shmserve_client *client, const Writer *question, int fd, const char *expected, int64_t until,
                              Reader *reader, size_t *items, int *received, shmserve_error *error) {
    size_t size = 0;
    Outcome outcome = send_packet(client->control, question->start, written(question), fd, until);
    if (outcome == DONE) outcome = receive_with_fd(client->control, client->packet, &size, received, until);
    if (outcome != DONE) return outcome_failed(error, outcome);
    *reader = (Reader){client->packet, client->packet + size, false};
    if ((*items = take_name(reader, expected)) != SIZE_MAX) return SHMSERVE_OK;
    if (*received >= 0) close(*received), *received = -1;
    char code[32], text[SHMSERVE_TEXT + 4]; /* which fail cuts where no character is divided */
    *items = take_name(reader, "Failed");
    if (*items == SIZE_MAX || *items < 2) return outcome_failed(error, VIOLATION);
    take_short(reader, code, sizeof code);
    take_short(reader, text, sizeof text);
    if (reader->bad) return outcome_failed(error, VIOLATION);
    shmserve_code failure = code_from_name(code);
    if (failure == SHMSERVE_OK) failure = SHMSERVE_UNKNOWN;
    fail(error, failure, "%s", text);
    if (error) error->http_status = CODES[failure].status;
    return failure;
}

static shmserve_code connect_socket(shmserve_client *client, int64_t until, shmserve_error *error) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    memcpy(address.sun_path, client->path, sizeof client->path);
    int sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (sock < 0) return fail(error, SHMSERVE_RESOURCE_EXHAUSTED, "no socket: %s", strerror(errno));
    while (connect(sock, (struct sockaddr *)&address, sizeof address)) {
        int problem = errno;
        if (problem == EINTR) continue;
        if (problem == EAGAIN && now_ns() < until) { /* the backlog is full, which the kernel says at once */
            wait_for(-1, 0, earlier(until, now_ns() + 5 * MS));
            continue;
        }
        close(sock);
        if (problem == EACCES)
            return fail(error, SHMSERVE_PERMISSION_DENIED, "this user may not open the client socket %s", client->path);
        return fail(error, SHMSERVE_UNAVAILABLE, "no server at the client socket %s: %s", client->path, strerror(problem));
    }
    struct ucred peer = {0};
    socklen_t size = sizeof peer;
    bool known = !getsockopt(sock, SOL_SOCKET, SO_PEERCRED, &peer, &size);
    for (size_t i = 0; i < 3 && known && !client->any_owner; i++)
        if (peer.uid == client->owners[i]) break;
        else if (i == 2) known = false;
    if (!known) {
        close(sock);
        return fail(error, SHMSERVE_PERMISSION_DENIED, "another user serves the client socket %s", client->path);
    }
    client->control = sock;
    return SHMSERVE_OK;
}

static shmserve_code connect_and_greet(shmserve_client *client, int64_t until, shmserve_error *error) {
    shmserve_code code = connect_socket(client, until, error);
    if (code) return code;
    uint8_t bytes[32];
    Writer w = writer(bytes, sizeof bytes);
    put_array(&w, 2), put_text(&w, "ClientHello"), put_uint(&w, 1);
    Reader r;
    size_t items;
    int fd;
    code = converse(client, &w, -1, "ServerHello", until, &r, &items, &fd, error);
    if (!code && fd >= 0) close(fd);
    if (!code && items < 1) code = outcome_failed(error, VIOLATION);
    if (!code) {
        uint64_t version = take_kind(&r, UNSIGNED);
        client->has_lanes = items > 1 && take_bool(&r);
        client->has_models = items > 2 && take_bool(&r);
        if (r.bad) code = outcome_failed(error, VIOLATION);
        else if (version != 1) code = fail(error, SHMSERVE_UNIMPLEMENTED, "the server speaks another version of the protocol");
    }
    if (code) disconnect(client);
    return code;
}

/* Have the server forget unwanted regions, over the connection as it is. */
static shmserve_code unregister(shmserve_client *client, int64_t until, shmserve_error *error) {
    Writer w = writer(client->packet, MAX_PACKET); /* has left before the reply comes */
    pthread_mutex_lock(&client->pool);
    size_t count = client->unwanted_count, items;
    put_array(&w, 2), put_text(&w, "Unregister"), put_array(&w, count);
    for (size_t i = 0; i < count; i++) put_text(&w, client->unwanted[i]);
    pthread_mutex_unlock(&client->pool);
    if (!count) return SHMSERVE_OK;
    Reader r;
    int received = -1;
    shmserve_code code = converse(client, &w, -1, "Ok", until, &r, &items, &received, error);
    close_fd(received);
    if (code && !error->http_status) return code; /* else the server will not */
    pthread_mutex_lock(&client->pool);
    client->unwanted_count -= count;
    memmove(client->unwanted, client->unwanted + count, client->unwanted_count * sizeof *client->unwanted);
    pthread_mutex_unlock(&client->pool);
    return SHMSERVE_OK;
}

/* Return why the server does not know the question for this reply, or NULL. */
static const char *lacking(const shmserve_client *client, const char *expected) {
    if (!client->has_lanes && !strcmp(expected, "LaneOpened")) return "the server has no lanes";
    if (!client->has_models && !strcmp(expected, "ModelDescribed")) return "the server is too old to describe models";
    return NULL;
}

/* Ask the server, in the caller's turn, and connect again where that is needed. `patience_ns`: how long to try.
 * Without question: unregister what is unwanted. */
static shmserve_code ask(shmserve_client *client, const Writer *question, int fd, const char *expected, int64_t until,
                         int64_t patience_ns, Reader *reader, size_t *items, int *received, shmserve_error *error) {
    int64_t now = now_ns(), give_up = after(now, patience_ns);
    *received = -1;
    client->was_sent = false;
    if (question && question->full) return fail(error, SHMSERVE_INVALID_ARGUMENT, "the names are too long");
    if (question && question->not_utf8) return fail(error, SHMSERVE_INVALID_ARGUMENT, "%s", NOT_UTF8);
    if (until <= now) return outcome_failed(error, TIMEOUT);
    for (;;) {
        int64_t end = earlier(until, now_ns() + ANSWER_NS);
        shmserve_error local = {.code = SHMSERVE_OK};
        shmserve_code code = client->control >= 0 ? SHMSERVE_OK : connect_and_greet(client, end, &local);
        const char *reason = code ? NULL : lacking(client, expected); /* of the server that is there now */
        if (reason) return fail(error, SHMSERVE_UNIMPLEMENTED, "%s", reason);
        bool answered = !code;
        if (!code) code = unregister(client, end, &local);
        if (!code && question) {
            client->was_sent = true;
            code = converse(client, question, fd, expected, end, reader, items, received, &local);
        }
        /* only the server's own failures have a status */
        if (code && !local.http_status) disconnect(client), answered = false;
        if (answered) client->patience_ns = client->reconnect_ns;
        bool again = !answered && (code == SHMSERVE_UNAVAILABLE || code == SHMSERVE_DEADLINE_EXCEEDED);
        now = now_ns();
        if (again && now < give_up && now < until) {
            wait_for(-1, 0, earlier(earlier(until, give_up), now + PAUSE_NS));
            continue;
        }
        if (again && patience_ns && now >= give_up) client->patience_ns = 0; /* not where the caller's own time was shorter */
        if (code && error) *error = local;
        return code;
    }
}

/* ------------------------------------------------------------------------------------------ finding the server */

/* Take `folder`/client.sock as the path if no other user can have put it there to receive tensors. */
static bool is_there(shmserve_client *client, const char *folder, bool services) {
    struct stat about;
    int length = snprintf(client->path, sizeof client->path, "%s/client.sock", folder);
    if (length < 0 || (size_t)length >= sizeof client->path || lstat(folder, &about)) return false;
    if (!services && about.st_uid != getuid() && about.st_uid != 0) return false;
    client->owners[0] = 0, client->owners[1] = geteuid(), client->owners[2] = about.st_uid;
    return !lstat(client->path, &about);
}

static shmserve_code find_path(shmserve_client *client, const char *path, shmserve_error *error) {
    if (!path || !*path) path = getenv("SHMSERVE_CLIENT_SOCKET");
    if (path && *path) {
        if (strlen(path) >= sizeof client->path)
            return fail(error, SHMSERVE_INVALID_ARGUMENT, "the path of the client socket is too long");
        memcpy(client->path, path, strlen(path) + 1);
        client->any_owner = true;
        return SHMSERVE_OK;
    }
    char folder[PATH_MAX];
    const char *run = getenv("SHMSERVE_RUN_DIR"), *runtime = getenv("XDG_RUNTIME_DIR");
    if (run && *run && is_there(client, run, false)) return SHMSERVE_OK;
    snprintf(folder, sizeof folder, "%s/shmserve", runtime ? runtime : "");
    if (runtime && *runtime && is_there(client, folder, false)) return SHMSERVE_OK;
    snprintf(folder, sizeof folder, "/tmp/shmserve-%ld", (long)getuid());
    if (is_there(client, folder, false) || is_there(client, "/run/shmserve", true)) return SHMSERVE_OK;
    return fail(error, SHMSERVE_UNAVAILABLE,
                "no client socket was found: name the server's client_socket (path, or SHMSERVE_CLIENT_SOCKET)");
}

static void set_up_looks(shmserve_client *client, int32_t look_us) {
    cpu_set_t set;
    int processors = sched_getaffinity(0, sizeof set, &set) ? 1 : CPU_COUNT(&set);
    if (look_us == 0) look_us = processors >= 2 ? 400 : -1;
    client->look_ns = look_us < 0 ? 0 : (int64_t)look_us * 1000;
    client->look_limit = processors >= 8 ? processors / 4 : 1;
}

shmserve_code shmserve_connect(const shmserve_options *options, shmserve_client **result, shmserve_error *error) {
    const shmserve_options none = {0};
    if (!options) options = &none;
    *result = NULL;
    uint64_t reserved = options->reserved_flags;
    for (size_t i = 0; i < sizeof options->reserved / sizeof *options->reserved; i++) reserved |= options->reserved[i];
    if (reserved) return fail(error, SHMSERVE_INVALID_ARGUMENT, "options: reserved fields must be zero");
    if (options->look_us > 1000) return fail(error, SHMSERVE_INVALID_ARGUMENT, "look_us: %d is more than 1000", options->look_us);
    shmserve_client *client = calloc(1, sizeof *client);
    if (!client) return fail(error, SHMSERVE_RESOURCE_EXHAUSTED, "no memory is left");
    client->owner = getpid();
    client->control = -1;
    client->max_bytes = options->max_bytes ? options->max_bytes : (size_t)1 << 30;
    client->reconnect_ns = options->reconnect_ns ? options->reconnect_ns : 3 * SECOND;
    if (client->reconnect_ns < 0) client->reconnect_ns = 0;
    client->patience_ns = client->reconnect_ns;
    set_up_looks(client, options->look_us);
    pthread_condattr_t monotonic;
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&client->turn_over, &monotonic);
    pthread_condattr_destroy(&monotonic);
    pthread_mutex_init(&client->turn, NULL);
    pthread_mutex_init(&client->pool, NULL);
    uint64_t random = (uint64_t)now_ns();
    if (getrandom(&random, sizeof random, GRND_NONBLOCK) < 0) random ^= (uint64_t)(uintptr_t)client;
    snprintf(client->prefix, sizeof client->prefix, "%ld-%016llx", (long)client->owner, (unsigned long long)random);
    int64_t until = limit(options->timeout_ns);
    shmserve_code code = find_path(client, options->path, error);
    if (!code) code = connect_and_greet(client, until, error);
    if (code) shmserve_close(client);
    else *result = client;
    return code;
}

/* -------------------------------------------------------------------------------------------------- memory */

/* Return the size of a block for `nbytes`: quarter steps between powers of two. 0: too large. */
static size_t size_class(size_t nbytes) {
    const size_t smallest = (size_t)16 * 1024;
    if (nbytes <= smallest) return smallest;
    if (nbytes > SIZE_MAX / 4) return 0;
    size_t step = smallest / 4;
    while (step * 8 < nbytes) step *= 2;
    return (nbytes + step - 1) / step * step;
}

/* Return the index in `order` of the last block that begins at or before an address, or -1. Holds `pool`. */
static ptrdiff_t order_of(const shmserve_client *client, const uint8_t *address) {
    size_t low = 0, high = client->order_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if ((uintptr_t)client->blocks[client->order[middle]].address <= (uintptr_t)address) low = middle + 1;
        else high = middle;
    }
    return (ptrdiff_t)low - 1;
}

/* Return the allocated block that an address lies in, or NULL. Holds `pool`. */
static Block *block_of(shmserve_client *client, const void *address) {
    ptrdiff_t index = order_of(client, address);
    Block *block = index < 0 ? NULL : &client->blocks[client->order[index]];
    return block && block->used && (size_t)((const uint8_t *)address - block->address) < block->size ? block : NULL;
}

/* Hold `pool`. */
static void list_block(shmserve_client *client, Block *block) {
    size_t index = (size_t)(order_of(client, block->address) + 1);
    memmove(client->order + index + 1, client->order + index, (client->order_count++ - index) * sizeof *client->order);
    client->order[index] = (uint16_t)(block - client->blocks);
    block->listed = true;
}

/* Return a sealed memfd; -1 with errno set if there is none. */
static int make_memory(const char *name, size_t size) {
    const size_t step = (size_t)2 << 20; /* a signal undoes one step: larger ones might never succeed */
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING), problem = 0;
    if (fd < 0) return -1;
    /* without memory this fails here, and does not kill the program later */
    for (size_t at = 0; at < size && !problem; at += step)
        do problem = posix_fallocate(fd, (off_t)at, (off_t)(size - at < step ? size - at : step));
        while (problem == EINTR);
    if (problem || fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL)) {
        if (!problem) problem = errno;
        close(fd);
        errno = problem;
        return -1;
    }
    return fd;
}

/* Register a region, in the caller's turn. */
static shmserve_code ask_register(shmserve_client *client, const Block *block, int64_t until, shmserve_error *error) {
    uint8_t bytes[128];
    Writer w = writer(bytes, sizeof bytes);
    put_array(&w, 4), put_text(&w, "RegisterMemfd"), put_text(&w, block->name), put_uint(&w, 0), put_uint(&w, block->size);
    Reader r;
    size_t items;
    int received;
    shmserve_code code = ask(client, &w, block->fd, "Ok", until, client->patience_ns, &r, &items, &received, error);
    close_fd(received);
    return code;
}

/* Note a region that the server is to forget. Hold `pool`. */
static void unwant(shmserve_client *client, const char *name) {
    if (client->unwanted_count == 2 * MAX_BLOCKS) return; /* never: see there */
    memcpy(client->unwanted[client->unwanted_count++], name, sizeof *client->unwanted);
}

/* Have the server forget unwanted regions now, if it is there: else it does with the next question. */
static void forget(shmserve_client *client, int64_t until) {
    Reader r;
    size_t items;
    int fd;
    pthread_mutex_lock(&client->pool);
    bool any = client->unwanted_count;
    pthread_mutex_unlock(&client->pool);
    if (!any || begin_turn(client, until, NULL)) return;
    for (int tries = 2; tries && ask(client, NULL, -1, "", until, 0, &r, &items, &fd, NULL); tries--) continue;
    end_turn(client);
}

/* Make memory, register it as a new region, and map it at `place` (NULL: anywhere). `bare` gets the memory's address,
 * name and descriptor. */
static shmserve_code new_memory(shmserve_client *client, size_t size, uint8_t *place, Block *bare, int64_t until,
                                shmserve_error *error) {
    pthread_mutex_lock(&client->pool);
    unsigned number = ++client->region_count;
    pthread_mutex_unlock(&client->pool);
    snprintf(bare->name, sizeof bare->name, "%s-%u", client->prefix, number);
    bare->fd = make_memory(bare->name, size);
    if (bare->fd < 0)
        return fail(error, SHMSERVE_RESOURCE_EXHAUSTED, "no shared memory of %zu bytes is left: %s", size, strerror(errno));
    bare->size = size;
    shmserve_code code = begin_turn(client, until, error);
    bool was_sent = false;
    if (!code) {
        code = ask_register(client, bare, until, error);
        was_sent = client->was_sent;
        end_turn(client);
    }
    if (!code) {
        int flags = MAP_SHARED | MAP_POPULATE | (place ? MAP_FIXED : 0);
        void *mapped = mmap(place, size, PROT_READ | PROT_WRITE, flags, bare->fd, 0);
        if (mapped == MAP_FAILED) code = fail(error, SHMSERVE_RESOURCE_EXHAUSTED, "no address space is left");
        else bare->address = mapped;
    }
    if (!code) return code;
    close_fd(bare->fd);
    pthread_mutex_lock(&client->pool);
    if (was_sent) unwant(client, bare->name);
    pthread_mutex_unlock(&client->pool);
    return code;
}

/* Give up a block. The server forgets it with the next question. Hold `pool`. */
static void discard(shmserve_client *client, Block *block) {
    size_t index = (size_t)order_of(client, block->address);
    memmove(client->order + index, client->order + index + 1, (--client->order_count - index) * sizeof *client->order);
    unwant(client, block->name);
    munmap(block->address, block->size);
    close_fd(block->fd);
    client->total_bytes -= block->size;
    *block = (Block){.fd = -1, .generation = block->generation + 1};
}

/* Return an unused block of the size, or a free entry for a new one (`address` is NULL), or NULL. Hold `pool`. */
static Block *reserve(shmserve_client *client, size_t size) {
    Block *entry = NULL;
    size_t in_use = client->total_bytes;
    for (size_t i = 0; i < MAX_BLOCKS; i++) {
        Block *block = &client->blocks[i];
        if (!block->address && !block->used) entry = block;
        if (!block->listed || block->used) continue;
        if (block->size == size) return block;
        in_use -= block->size;
    }
    if (size > client->max_bytes || in_use > client->max_bytes - size) return NULL;
    for (size_t i = 0; i < MAX_BLOCKS && (!entry || client->total_bytes > client->max_bytes - size); i++) {
        if (!client->blocks[i].listed || client->blocks[i].used) continue;
        entry = &client->blocks[i];
        discard(client, entry);
    }
    return entry;
}

static void *allocate(shmserve_client *client, size_t nbytes, int64_t until, shmserve_error *error) {
    size_t size = size_class(nbytes);
    pthread_mutex_lock(&client->pool);
    Block *block = size ? reserve(client, size) : NULL;
    if (block) block->used = true;
    bool fresh = block && !block->address;
    if (fresh) client->total_bytes += size;
    pthread_mutex_unlock(&client->pool);
    if (!block) {
        fail(error, SHMSERVE_RESOURCE_EXHAUSTED, "%zu bytes: the pool is full (max_bytes, or %d buffers)", nbytes, MAX_BLOCKS);
        return NULL;
    }
    if (!fresh) return block->address;
    Block bare = {0};
    shmserve_code code = new_memory(client, size, NULL, &bare, until, error);
    pthread_mutex_lock(&client->pool);
    if (code) {
        client->total_bytes -= size;
        block->used = false;
    } else {
        block->address = bare.address, block->fd = bare.fd, block->size = size;
        memcpy(block->name, bare.name, sizeof bare.name);
        list_block(client, block);
    }
    pthread_mutex_unlock(&client->pool);
    return code ? NULL : bare.address;
}

void *shmserve_alloc(shmserve_client *client, size_t nbytes, shmserve_error *error) {
    return owned(client, error) ? NULL : allocate(client, nbytes, limit(0), error);
}

/* Return true if the server still has to forget the buffer. */
static bool give_back(shmserve_client *client, void *buffer) {
    pthread_mutex_lock(&client->pool);
    Block *block = buffer ? block_of(client, buffer) : NULL;
    if (block && block->address != buffer) block = NULL;
    bool gone = block && (block->live || block->late || block->stained);
    if (gone) discard(client, block);
    else if (block) block->used = false;
    pthread_mutex_unlock(&client->pool);
    return gone;
}

void shmserve_free(shmserve_client *client, void *buffer) {
    if (!buffer || owned(client, NULL)) return;
    if (give_back(client, buffer)) forget(client, now_ns() + TRY_NS);
}

/* Replace a block's memory at the same address, unless a request is using it. */
static shmserve_code renew(shmserve_client *client, void *buffer, int64_t until, shmserve_error *error) {
    pthread_mutex_lock(&client->pool);
    Block *block = block_of(client, buffer);
    if (block && block->address != buffer) block = NULL;
    bool in_use = block && block->live;
    Block bare = {0}, old = block ? *block : bare;
    if (block && !in_use) block->live = 1, block->late++; /* keeps other threads and requests out */
    pthread_mutex_unlock(&client->pool);
    if (!block) return fail(error, SHMSERVE_INVALID_ARGUMENT, "no buffer of this client begins there");
    if (in_use) return fail(error, SHMSERVE_FAILED_PRECONDITION, "other requests are using the buffer");
    shmserve_code code = new_memory(client, old.size, old.address, &bare, until, error);
    pthread_mutex_lock(&client->pool);
    block->live = 0;
    if (code) block->late--;
    else {
        unwant(client, old.name);
        block->fd = bare.fd;
        memcpy(block->name, bare.name, sizeof bare.name);
        block->late = 0, block->stained = false;
        block->generation++;
    }
    pthread_mutex_unlock(&client->pool);
    if (code) return code;
    close_fd(old.fd);
    forget(client, earlier(until, now_ns() + TRY_NS));
    return code;
}

shmserve_code shmserve_renew(shmserve_client *client, void *buffer, shmserve_error *error) {
    shmserve_code code = owned(client, error);
    return code ? code : renew(client, buffer, limit(0), error);
}

void shmserve_close(shmserve_client *client) {
    if (!client) return;
    for (size_t i = 0; i < MAX_BLOCKS; i++)
        if (client->blocks[i].listed) discard(client, &client->blocks[i]);
    bool ours = !owned(client, NULL);
    if (ours) forget(client, now_ns() + TRY_NS), disconnect(client);
    else close_fd(client->control);
    free(client); /* with its locks, which threads of a parent may have */
}

shmserve_code shmserve_describe(shmserve_client *client, const char *name, const char *version, int64_t timeout_ns,
                                shmserve_model **result, shmserve_error *error) {
    int64_t until = limit(timeout_ns);
    uint8_t bytes[4096];
    Writer w = writer(bytes, sizeof bytes);
    put_array(&w, 3), put_text(&w, "DescribeModel"), put_text(&w, name), put_text(&w, version);
    if (!name || !*name || w.full) return fail(error, SHMSERVE_INVALID_ARGUMENT, "name: empty or too long");
    shmserve_code code = owned(client, error);
    if (code) return code;
    Model *model = *result ? (Model *)*result : new_pages(sizeof *model, error);
    if (!model) return SHMSERVE_RESOURCE_EXHAUSTED;
    if (!(code = begin_turn(client, until, error))) {
        Reader r;
        size_t items;
        int fd;
        code = ask(client, &w, -1, "ModelDescribed", until, client->patience_ns, &r, &items, &fd, error);
        if (!code && fd >= 0) close(fd);
        if (!code && !decode_model(&r, items, name, model)) {
            code = outcome_failed(error, VIOLATION);
            disconnect(client);
        }
        end_turn(client);
    }
    if (!code) *result = &model->described;
    else if (!*result) shmserve_model_free(&model->described);
    return code;
}

void shmserve_model_free(shmserve_model *model) {
    if (model) munmap(model, sizeof(Model));
}

/* --------------------------------------------------------------------------------------------------- lanes */

/* Looks, as the server's programs take them: a wait polls first if the last wait was short. A look ends when the
 * processor was away for long, as other programs need it then, and looks pause. Looks in vain cost time from an account
 * that grows by 1 % of real time; looks with an answer are free for a thread with several quick waits in a row. */
#define QUICK_NS (1 * MS)
#define ACTIVE 4
#define SAVED_NS (4 * MS)
#define AWAY_NS (MS / 20)
#define LONG_AWAY_NS (1 * MS)
#define PAUSE_LOOKS_NS (5 * MS)

typedef struct {
    bool is_short; /* the last wait was shorter than the budget */
    int quick;     /* waits below QUICK_NS in a row */
    int64_t account_ns, noted_at, pause_ns, resume_at;
} Look;

/* A buffer that a call names. */
typedef struct {
    uint16_t block;
    bool is_output;
    uint32_t generation;
} Use;

/* A wanted output; the name lies in the call's packet. `data`: its window, or NULL. */
typedef struct {
    size_t name_at, name_length, nbytes;
    void *data;
} Wanted;

/* UNSENT: to be sent, perhaps again. FAILED: the library's own answer waits in `failure`. GIVEN_UP: the caller has its
 * answer, the server has not answered yet. */
typedef enum { FREE, UNSENT, SENT, FAILED, GIVEN_UP } State;

typedef struct {
    State state;     /* it and `number` change under the lane's guard */
    uint64_t number;
    atomic_bool cancelled;
    bool cancel_sent; /* changes under the guard */
    bool answered, hold_credit, died, registered_again;
    void *user;
    int64_t deadline, given_up_at;
    uint32_t attempts, credit, taken, given; /* taken: answers without credit; given: credit of these, to be sent */
    size_t size, timeout_at; /* of the packet; where its timeout_ns is, 0: without limit */
    size_t use_count, wanted_count; /* nothing wanted: all outputs, in the answer */
    uint8_t *scratch; /* memory of the pool for inputs that lie elsewhere; NULL: none yet */
    size_t scratch_size;
    struct Parts {
        Use uses[2 * SHMSERVE_MAX_TENSORS];
        Wanted wanted[SHMSERVE_MAX_TENSORS];
        shmserve_error failure;
        uint8_t packet[MAX_PACKET];
    } *parts; /* elsewhere, as all calls of a lane are looked through often */
} Call;

struct shmserve_lane {
    shmserve_client *client;
    char model[512], version[64];
    pthread_mutex_t guard;
    int fd; /* -1: to be opened; changes under the guard */
    int epoll; /* -1: not asked for */
    bool leaving; /* the executor takes no further request: open another lane when the others are answered */
    bool impatient; /* no lane could be opened: calls do not wait for one until there is one again */
    int64_t give_up_at, retry_at; /* while no lane could be opened; else 0 */
    int64_t opened_at;
    Opened opened;
    uint64_t last_number;
    size_t live; /* calls without a final answer */
    Look look;
    shmserve_answer answer;
    uint8_t packet[MAX_PACKET];
    Decoded decoded;
    size_t call_count; /* entries that have been used; changes under the guard */
    Call calls[CALLS];
    struct Parts parts[CALLS];
};

static bool may_look(shmserve_lane *lane, int64_t now) {
    Look *look = &lane->look;
    shmserve_client *client = lane->client;
    if (!client->look_ns || !look->is_short || now < look->resume_at) return false;
    look->account_ns = earlier(SAVED_NS, look->account_ns + (now - look->noted_at) / 100);
    look->noted_at = now;
    if (look->account_ns <= 0) return false;
    if (atomic_fetch_add(&client->looking, 1) < client->look_limit) return true;
    atomic_fetch_sub(&client->looking, 1);
    return false;
}

static Outcome look_for_packet(shmserve_lane *lane, int64_t began, int64_t end, size_t *size) {
    Look *look = &lane->look;
    int64_t now = began, last = began;
    Outcome outcome;
    for (;;) {
        outcome = receive_now(lane->fd, lane->packet, size);
        last = now, now = now_ns();
        if (now - last > (outcome == TIMEOUT ? AWAY_NS : LONG_AWAY_NS)) {
            if (look->pause_ns < PAUSE_LOOKS_NS) look->pause_ns = PAUSE_LOOKS_NS;
            look->resume_at = now + look->pause_ns;
            look->pause_ns = earlier(2 * look->pause_ns, 2 * SECOND);
            break;
        }
        if (outcome != TIMEOUT) {
            if (look->pause_ns > PAUSE_LOOKS_NS) look->pause_ns /= 2;
            break;
        }
        if (now >= end) break;
        sched_yield();
    }
    atomic_fetch_sub(&lane->client->looking, 1);
    if (look->quick <= ACTIVE) look->quick++;
    if (outcome != TIMEOUT && look->quick > ACTIVE) look->account_ns += (now - began) / 4;
    else look->account_ns -= now - began;
    return outcome;
}

static Outcome receive(shmserve_lane *lane, int64_t until, size_t *size) {
    Look *look = &lane->look;
    int64_t began = now_ns();
    if (until <= began) return receive_now(lane->fd, lane->packet, size);
    bool looked = may_look(lane, began);
    Outcome outcome = TIMEOUT;
    if (looked) outcome = look_for_packet(lane, began, earlier(until, began + lane->client->look_ns), size);
    while (outcome == TIMEOUT && wait_for(lane->fd, POLLIN, until)) outcome = receive_now(lane->fd, lane->packet, size);
    int64_t took = now_ns() - began;
    look->is_short = took < lane->client->look_ns;
    if (!looked || !look->is_short) look->quick = took < QUICK_NS && !looked ? look->quick + (look->quick <= ACTIVE) : 0;
    return outcome;
}

/* ------------------------------------------------------------------------------------ a call's memory and packet */

/* Note what became of the buffers that a call names. `late`: the call was given up before. `lost`: the server may write
 * to its outputs for ever. `give_up`: until the server answers. */
static void release(shmserve_lane *lane, Call *call, bool late, bool give_up, bool lost) {
    shmserve_client *client = lane->client;
    pthread_mutex_lock(&client->pool);
    for (size_t i = 0; i < call->use_count; i++) {
        Use *use = &call->parts->uses[i];
        Block *block = &client->blocks[use->block];
        if (block->generation != use->generation) continue;
        if (!late) block->live--;
        else if (use->is_output) block->late--;
        if (give_up && use->is_output) block->late++;
        if (lost && use->is_output) block->stained = true;
        if (lost && block->address == call->scratch) block->stained = true; /* may still be read */
    }
    pthread_mutex_unlock(&client->pool);
    if (give_up) return;
    call->use_count = 0;
    if (lost && call->scratch) give_back(client, call->scratch), call->scratch = NULL;
}

static void set_state(shmserve_lane *lane, Call *call, State state) {
    pthread_mutex_lock(&lane->guard);
    call->state = state;
    if (state == FREE) call->number = 0;
    pthread_mutex_unlock(&lane->guard);
}

/* Write the window of a part of a buffer, and note its use. NULL: not in a buffer. Holds `pool`. */
static Block *put_window(shmserve_lane *lane, Call *call, Writer *w, const void *data, size_t nbytes, bool is_output) {
    Block *block = block_of(lane->client, data);
    if (!block) return NULL;
    size_t offset = (size_t)((const uint8_t *)data - block->address);
    if (nbytes > block->size - offset || block->stained || block->late) return block;
    put_array(w, 3), put_text(w, block->name), put_uint(w, offset), put_uint(w, nbytes);
    call->parts->uses[call->use_count++] = (Use){(uint16_t)(block - lane->client->blocks), is_output, block->generation};
    block->live++;
    return block;
}

static shmserve_code not_usable(const Block *block, const char *what, const char *name, shmserve_error *error) {
    if (!block) return fail(error, SHMSERVE_INVALID_ARGUMENT, "%s '%s' is not in memory of shmserve_alloc", what, name);
    if (block->stained || block->late)
        return fail(error, SHMSERVE_FAILED_PRECONDITION,
                    "%s '%s': the server may still write to this buffer: renew it (shmserve_renew)", what, name);
    return fail(error, SHMSERVE_INVALID_ARGUMENT, "%s '%s' reaches beyond its buffer", what, name);
}

static size_t aligned(size_t nbytes) { return (nbytes + 255) & ~(size_t)255; }

/* Hold `pool`. */
static shmserve_code put_tensors(shmserve_lane *lane, Call *call, Writer *w, const shmserve_request *request,
                                 shmserve_error *error) {
    size_t offset = 0;
    put_array(w, request->input_count);
    for (size_t i = 0; i < request->input_count; i++) {
        const shmserve_tensor *input = &request->inputs[i];
        put_array(w, 4), put_text(w, input->name), put_text(w, shmserve_datatype_name(input->datatype));
        put_array(w, input->rank);
        for (size_t k = 0; k < input->rank; k++) put_int(w, input->shape[k]);
        size_t uses = call->use_count;
        Block *block = input->nbytes ? put_window(lane, call, w, input->data, input->nbytes, false) : NULL;
        if (call->use_count > uses) continue;
        if (!block && input->nbytes < SHMSERVE_INLINE_BYTES) {
            put_bytes(w, input->data, input->nbytes);
            continue;
        }
        if (!block) {
            block = put_window(lane, call, w, call->scratch + offset, input->nbytes, false);
            offset += aligned(input->nbytes);
        }
        if (call->use_count == uses) return not_usable(block, "input", input->name, error);
    }
    put_array(w, request->output_count);
    for (size_t i = 0; i < request->output_count; i++) {
        const shmserve_output *output = &request->outputs[i];
        put_array(w, output->data ? 2 : 1);
        size_t length = output->name ? strlen(output->name) : 0, uses = call->use_count;
        put_text(w, output->name);
        call->parts->wanted[call->wanted_count++] = (Wanted){written(w) - length, length, output->nbytes, output->data};
        if (!output->data) continue;
        Block *block = put_window(lane, call, w, output->data, output->nbytes, true);
        if (call->use_count == uses) return not_usable(block, "output", output->name, error);
    }
    return SHMSERVE_OK;
}

static void put_parameters(Writer *w, const shmserve_request *request) {
    put_tag(w, 0xde, request->parameter_count, 2);
    for (size_t i = 0; i < request->parameter_count; i++) {
        const shmserve_parameter *parameter = &request->parameters[i];
        uint64_t bits;
        put_text(w, parameter->name);
        switch (parameter->kind) {
        case SHMSERVE_IS_BOOL: put_tag(w, parameter->value.boolean ? 0xc3 : 0xc2, 0, 0); break;
        case SHMSERVE_IS_INT: put_int(w, parameter->value.integer); break;
        case SHMSERVE_IS_DOUBLE:
            memcpy(&bits, &parameter->value.number, sizeof bits);
            put_tag(w, 0xcb, bits, 8);
            break;
        default: put_text(w, parameter->value.string);
        }
    }
}

static shmserve_code encode(shmserve_lane *lane, Call *call, const shmserve_request *request, shmserve_error *error) {
    Writer w = writer(call->parts->packet, MAX_PACKET);
    call->use_count = call->wanted_count = 0;
    put_array(&w, 8), put_text(&w, "LaneRequest"), put_uint(&w, ++lane->last_number);
    pthread_mutex_lock(&lane->client->pool);
    shmserve_code code = put_tensors(lane, call, &w, request, error);
    pthread_mutex_unlock(&lane->client->pool);
    put_text(&w, request->id);
    put_parameters(&w, request);
    call->timeout_at = written(&w);
    put_tag(&w, 0xcf, 0, 8);
    put_uint(&w, request->credit);
    call->size = written(&w);
    if (!code && w.full)
        code = fail(error, SHMSERVE_INVALID_ARGUMENT, "the request takes more than the %zu bytes of a message", MAX_PACKET);
    if (!code && w.not_utf8) code = fail(error, SHMSERVE_INVALID_ARGUMENT, "%s", NOT_UTF8);
    if (code) release(lane, call, false, false, false);
    return code;
}

static shmserve_code check(const shmserve_request *request, shmserve_error *error) {
    size_t most = SHMSERVE_MAX_TENSORS;
    if (request->input_count > most || request->output_count > most || request->parameter_count > most)
        return fail(error, SHMSERVE_INVALID_ARGUMENT, "more than %zu inputs, outputs or parameters", most);
    for (size_t i = 0; i < sizeof request->reserved / sizeof *request->reserved; i++)
        if (request->reserved[i]) return fail(error, SHMSERVE_INVALID_ARGUMENT, "request: reserved fields must be zero");
    for (size_t i = 0; i < request->input_count; i++) {
        const shmserve_tensor *input = &request->inputs[i];
        const char *name = input->name ? input->name : "";
        if (input->rank > SHMSERVE_MAX_RANK || (input->rank && !input->shape))
            return fail(error, SHMSERVE_INVALID_ARGUMENT, "input '%s': rank %zu, or no shape", name, input->rank);
        if (!*shmserve_datatype_name(input->datatype))
            return fail(error, SHMSERVE_INVALID_ARGUMENT, "input '%s': datatype %d", name, (int)input->datatype);
        if (input->nbytes > SIZE_MAX / (2 * most)) return fail(error, SHMSERVE_INVALID_ARGUMENT, "input '%s' is too large", name);
        if (input->nbytes && !input->data) return fail(error, SHMSERVE_INVALID_ARGUMENT, "input '%s' has no data", name);
    }
    return SHMSERVE_OK;
}

/* Copy large inputs from outside of the pool to the call's scratch memory, and renew outputs' buffers that a former
 * request may still write to. */
static shmserve_code prepare(shmserve_lane *lane, Call *call, const shmserve_request *request, shmserve_error *error) {
    shmserve_client *client = lane->client;
    shmserve_error local;
    if (!error) error = &local;
    size_t total = 0;
    for (int copying = 0; copying < 2; copying++) {
        size_t offset = 0;
        for (size_t i = 0; i < request->input_count; i++) {
            const shmserve_tensor *input = &request->inputs[i];
            if (input->nbytes < SHMSERVE_INLINE_BYTES) continue;
            pthread_mutex_lock(&client->pool);
            bool outside = !block_of(client, input->data);
            pthread_mutex_unlock(&client->pool);
            if (!outside) continue;
            if (copying && offset + input->nbytes <= call->scratch_size) memcpy(call->scratch + offset, input->data, input->nbytes);
            offset += aligned(input->nbytes);
        }
        if (!(total = offset)) break;
        if (copying || (call->scratch && call->scratch_size >= total)) continue;
        give_back(client, call->scratch);
        call->scratch = allocate(client, total, call->deadline, error);
        if (!call->scratch) return error->code;
        call->scratch_size = total;
    }
    for (size_t i = 0; i < request->output_count; i++) {
        void *data = request->outputs[i].data;
        if (!data) continue;
        pthread_mutex_lock(&client->pool);
        Block *block = block_of(client, data);
        bool renews = block && block->address == data && (block->stained || block->late);
        for (size_t k = 0; renews && k < request->input_count; k++)
            renews = block_of(client, request->inputs[k].data) != block; /* contents would be lost */
        pthread_mutex_unlock(&client->pool);
        shmserve_code code = renews ? renew(client, data, call->deadline, error) : SHMSERVE_OK;
        if (code) return code;
    }
    return SHMSERVE_OK;
}

/* --------------------------------------------------------------------------------------- the lane and its calls */

static void call_failed(shmserve_lane *lane, Call *call, shmserve_code code, const char *text) {
    fail(&call->parts->failure, code, "%s", text);
    set_state(lane, call, FAILED);
}

/* Close the lane's socket. Calls that the server has are lost, or are sent again where that is allowed. */
static void lane_lost(shmserve_lane *lane, shmserve_code code) {
    pthread_mutex_lock(&lane->guard);
    if (lane->epoll >= 0 && lane->fd >= 0) epoll_ctl(lane->epoll, EPOLL_CTL_DEL, lane->fd, NULL); /* a child may have it too */
    end_socket(lane->fd);
    lane->fd = -1;
    pthread_mutex_unlock(&lane->guard);
    lane->leaving = false;
    int64_t now = now_ns();
    if (now - lane->opened_at < PAUSE_NS) lane->retry_at = now + PAUSE_NS; /* lanes that end at once are not asked for at once */
    for (size_t i = 0; i < lane->call_count; i++) {
        Call *call = &lane->calls[i];
        if (call->state == GIVEN_UP) {
            release(lane, call, true, false, true);
            set_state(lane, call, FREE);
        } else if (call->state == SENT) {
            bool again = code == SHMSERVE_ABORTED && lane->opened.rerun && !call->use_count && !call->died && !call->answered;
            call->died = true;
            if (!again) release(lane, call, false, false, true);
            if (again) set_state(lane, call, UNSENT);
            else call_failed(lane, call, code, code == SHMSERVE_ABORTED ? DIED : "the executor broke the lane's protocol");
        }
    }
}

static size_t count_calls(const shmserve_lane *lane, State state) {
    size_t count = 0;
    for (size_t i = 0; i < lane->call_count; i++) count += lane->calls[i].state == state;
    return count;
}

static void cancel_unsent(shmserve_lane *lane, Call *call) {
    release(lane, call, false, false, false);
    call_failed(lane, call, SHMSERVE_CANCELLED, "the request was cancelled");
}

/* Send a call over the open lane. It stays unsent where the socket is full, as the executor may not read before this
 * end has taken answers, where the server has as many requests as may be, and where the lane has ended. */
static void send_call(shmserve_lane *lane, Call *call) {
    if (count_calls(lane, SENT) + count_calls(lane, GIVEN_UP) >= UNDER_WAY) return;
    int64_t left = call->deadline == NEVER ? 0 : call->deadline - now_ns();
    if (left < 0) left = 1;
    for (unsigned i = 0; call->timeout_at && i < 8; i++)
        call->parts->packet[call->timeout_at + 1 + i] = (uint8_t)((uint64_t)left >> 8 * (7 - i));
    pthread_mutex_lock(&lane->guard);
    bool cancelled = atomic_load(&call->cancelled);
    Outcome outcome = cancelled ? TIMEOUT : send_packet(lane->fd, call->parts->packet, call->size, -1, 0);
    if (outcome == DONE) call->state = SENT;
    pthread_mutex_unlock(&lane->guard);
    if (cancelled) cancel_unsent(lane, call);
    if (outcome == DONE) call->attempts++;
    if (outcome != GONE) return;
    if (count_calls(lane, SENT)) lane->leaving = true; /* their answers may be there: the lane is lost when all is read */
    else lane_lost(lane, SHMSERVE_ABORTED);
}

/* Ask the server once for a lane. */
static shmserve_code open_once(shmserve_lane *lane, int64_t until, shmserve_error *error) {
    shmserve_client *client = lane->client;
    uint8_t bytes[1024];
    Writer w = writer(bytes, sizeof bytes);
    put_array(&w, 3), put_text(&w, "OpenLane"), put_text(&w, lane->model), put_text(&w, lane->version);
    Reader r;
    Opened opened;
    size_t items;
    int fd = -1;
    shmserve_code code = begin_turn(client, until, error);
    if (code) return code;
    code = ask(client, &w, -1, "LaneOpened", until, 0, &r, &items, &fd, error);
    if (!code && (fd < 0 || !is_seqpacket(fd) || !decode_opened(&r, items, &opened))) {
        close_fd(fd);
        disconnect(client);
        code = outcome_failed(error, VIOLATION);
    }
    end_turn(client);
    if (code) return code;
    if (lane->epoll >= 0) {
        struct epoll_event event = {.events = EPOLLIN};
        if (epoll_ctl(lane->epoll, EPOLL_CTL_ADD, fd, &event)) {
            close(fd);
            return fail(error, SHMSERVE_RESOURCE_EXHAUSTED, "epoll: %s", strerror(errno));
        }
    }
    pthread_mutex_lock(&lane->guard);
    lane->fd = fd;
    pthread_mutex_unlock(&lane->guard);
    lane->opened = opened;
    lane->opened_at = now_ns();
    return SHMSERVE_OK;
}

/* Try to open the lane. Return OK; a failure with `retry_at` set: try again then; or why no lane will be there. */
static shmserve_code open_lane(shmserve_lane *lane, int64_t until, shmserve_error *error) {
    int64_t now = now_ns();
    if (lane->retry_at > now) return SHMSERVE_UNAVAILABLE;
    if (!lane->give_up_at) lane->give_up_at = lane->impatient ? now : after(now, lane->client->reconnect_ns);
    shmserve_code code = open_once(lane, earlier(until, now + ANSWER_NS), error);
    now = now_ns();
    bool again = code == SHMSERVE_UNAVAILABLE || code == SHMSERVE_RESOURCE_EXHAUSTED || code == SHMSERVE_DEADLINE_EXCEEDED;
    if (again && now < lane->give_up_at) {
        lane->retry_at = now + PAUSE_NS;
        return code;
    }
    lane->impatient = again;
    lane->give_up_at = lane->retry_at = 0;
    return code;
}

/* Return true if the executor has not answered cancelled requests for long, or all requests that it has are such. */
static bool is_stuck(const shmserve_lane *lane) {
    size_t late = 0;
    int64_t now = now_ns();
    for (size_t i = 0; i < lane->call_count; i++)
        if (lane->calls[i].state == GIVEN_UP) late += now - lane->calls[i].given_up_at > LATE_NS ? UNDER_WAY : 1;
    return late >= UNDER_WAY;
}

/* Send the unsent calls, over a new lane where that is needed. Waits at most until `until`. */
static void send_unsent(shmserve_lane *lane, int64_t until) {
    shmserve_error error = {.code = SHMSERVE_OK};
    /* the next lane leads to another executor, if there is one */
    if (lane->fd >= 0 && !count_calls(lane, SENT) && (lane->leaving || is_stuck(lane))) lane_lost(lane, SHMSERVE_ABORTED);
    if (lane->leaving) return; /* answers are still to come, or to be read */
    shmserve_code code = lane->fd >= 0 ? SHMSERVE_OK : open_lane(lane, until, &error);
    if (code && lane->retry_at) return;
    for (size_t i = 0; i < lane->call_count; i++) {
        Call *call = &lane->calls[i];
        if (call->state != UNSENT) continue;
        if (!code && lane->fd >= 0 && !lane->leaving) send_call(lane, call);
        if (!code) continue;
        release(lane, call, false, false, false);
        call_failed(lane, call, call->died ? SHMSERVE_ABORTED : code, call->died ? DIED : error.text);
    }
}

shmserve_code shmserve_lane_open(shmserve_client *client, const char *model, const char *version, int64_t timeout_ns,
                                 shmserve_lane **result, shmserve_error *error) {
    int64_t until = limit(timeout_ns);
    *result = NULL;
    if (!version) version = "";
    if (!model || strlen(model) >= sizeof((shmserve_lane *)0)->model || strlen(version) >= sizeof((shmserve_lane *)0)->version)
        return fail(error, SHMSERVE_INVALID_ARGUMENT, "the name of the model or the version is too long");
    shmserve_code code = owned(client, error);
    if (code) return code;
    shmserve_lane *lane = new_pages(sizeof *lane, error);
    if (!lane) return SHMSERVE_RESOURCE_EXHAUSTED;
    lane->client = client, lane->fd = lane->epoll = -1;
    memcpy(lane->model, model, strlen(model) + 1);
    memcpy(lane->version, version, strlen(version) + 1);
    pthread_mutex_init(&lane->guard, NULL);
    shmserve_error local = {.code = SHMSERVE_OK};
    code = open_lane(lane, until, &local);
    while (code && lane->retry_at && lane->retry_at < until) {
        wait_for(-1, 0, lane->retry_at);
        code = open_lane(lane, until, &local);
    }
    if (code) shmserve_lane_close(lane);
    else *result = lane;
    if (code && error) *error = local;
    return code;
}

void shmserve_lane_close(shmserve_lane *lane) {
    if (!lane) return;
    shmserve_client *client = lane->client;
    if (owned(client, NULL)) close_fd(lane->fd);
    else {
        lane_lost(lane, SHMSERVE_CANCELLED);
        for (size_t i = 0; i < lane->call_count; i++) {
            if (lane->calls[i].state == UNSENT) release(lane, &lane->calls[i], false, false, false);
            give_back(client, lane->calls[i].scratch);
        }
        forget(client, now_ns() + TRY_NS);
    }
    close_fd(lane->epoll);
    munmap(lane, sizeof *lane);
}

const char *shmserve_lane_version(const shmserve_lane *lane) { return lane->opened.version; }

const char *shmserve_lane_instance(const shmserve_lane *lane) { return lane->opened.instance; }

size_t shmserve_under_way(const shmserve_lane *lane) { return lane->live; }

/* ---------------------------------------------------------------------------------------------------- answers */

/* Send a message without `answers` where that is 0. Return false if the socket has no room. */
static bool send_short(shmserve_lane *lane, const char *name, uint64_t number, uint32_t answers) {
    uint8_t bytes[64];
    Writer w = writer(bytes, sizeof bytes);
    put_array(&w, answers ? 3 : 2), put_text(&w, name), put_uint(&w, number);
    if (answers) put_uint(&w, answers);
    /* a lane that has ended is noticed when it is read */
    return send_packet(lane->fd, bytes, written(&w), -1, 0) != TIMEOUT;
}

/* Ask the executor to end a call, if it has not been asked and the socket has room. Hold the guard. */
static void send_cancel(shmserve_lane *lane, Call *call) {
    if (!call->cancel_sent) call->cancel_sent = send_short(lane, "LaneCancel", call->number, 0);
}

static void ask_to_end(shmserve_lane *lane, Call *call) {
    pthread_mutex_lock(&lane->guard);
    atomic_store(&call->cancelled, true);
    send_cancel(lane, call);
    pthread_mutex_unlock(&lane->guard);
}

static Call *call_of(shmserve_lane *lane, uint64_t number) {
    for (size_t i = 0; number && i < lane->call_count; i++)
        if (lane->calls[i].number == number) return &lane->calls[i];
    return NULL;
}

/* Begin the answer of a call. A final answer ends the call. */
static shmserve_answer *begin_answer(shmserve_lane *lane, Call *call, bool final) {
    lane->answer = (shmserve_answer){.ticket = call->number, .user = call->user, .text = "", .final = final};
    lane->answer.attempts = call->attempts;
    if (final) lane->live--;
    return &lane->answer;
}

static const shmserve_answer *failed_answer(shmserve_lane *lane, Call *call, State state) {
    shmserve_answer *answer = begin_answer(lane, call, true);
    answer->code = call->parts->failure.code;
    answer->text = call->parts->failure.text;
    set_state(lane, call, state);
    return answer;
}

/* Give up a call whose time is over. The server is asked to end it, and answers later. */
static const shmserve_answer *expire(shmserve_lane *lane, Call *call) {
    bool sent = call->state == SENT;
    fail(&call->parts->failure, SHMSERVE_DEADLINE_EXCEEDED, "%s", LATE);
    if (sent) ask_to_end(lane, call);
    release(lane, call, false, sent, false);
    call->given_up_at = now_ns();
    return failed_answer(lane, call, sent ? GIVEN_UP : FREE);
}

/* Find the windows of an answer's outputs. Return false if the answer does not fit the request. */
static bool find_windows(Call *call, Decoded *d) {
    for (size_t i = 0; i < d->output_count; i++) {
        shmserve_tensor *output = &d->outputs[i];
        const Wanted *found = NULL;
        size_t length = strlen(output->name);
        for (size_t k = 0; !found && k < call->wanted_count; k++) {
            const Wanted *wanted = &call->parts->wanted[(i + k) % call->wanted_count];
            if (wanted->name_length != length || memcmp(call->parts->packet + wanted->name_at, output->name, length)) continue;
            found = wanted;
        }
        bool has_window = found && found->data;
        if ((!found && call->wanted_count) || has_window == (output->data != NULL)) return false;
        if (!has_window) continue;
        output->nbytes = tensor_bytes(output, found->data, found->nbytes);
        output->data = found->data;
        if (output->nbytes == SIZE_MAX) return false;
    }
    return true;
}

static bool memory_unknown(const Call *call, const Decoded *d) {
    return d->status == 404 && d->final && call->use_count && !call->registered_again && !call->answered &&
           strstr(d->text, "shared memory");
}

/* Register the memory of a call again, at a server that was restarted and has lost it. */
static shmserve_code register_again(shmserve_lane *lane, const Call *call, int64_t until) {
    shmserve_client *client = lane->client;
    bool done[MAX_BLOCKS] = {false};
    shmserve_code code = begin_turn(client, until, NULL);
    if (code) return code;
    for (size_t i = 0; i < call->use_count && !code; i++) {
        uint16_t index = call->parts->uses[i].block; /* the block stays as it is while a call is using it */
        if (!done[index]) code = ask_register(client, &client->blocks[index], until, NULL);
        done[index] = true;
    }
    end_turn(client);
    return code;
}

/* Take in a packet. Return the answer for the caller, or NULL if there is none. */
static const shmserve_answer *take_packet(shmserve_lane *lane, size_t size) {
    Decoded *d = &lane->decoded;
    Call *call = decode_answer(lane->packet, size, d) ? call_of(lane, d->number) : NULL;
    /* no answer comes without credit, or late answers could come for ever */
    if (!call || (call->state != SENT && call->state != GIVEN_UP) || (!d->final && call->taken++ >= call->credit) ||
        (call->state == SENT && !d->moved && !find_windows(call, d))) {
        lane_lost(lane, SHMSERVE_PROTOCOL);
        return NULL;
    }
    if (call->state == GIVEN_UP) {
        if (d->final) release(lane, call, true, false, false), set_state(lane, call, FREE);
        return NULL;
    }
    if (d->moved) {
        set_state(lane, call, UNSENT);
        lane->leaving = true;
        return NULL;
    }
    if (memory_unknown(call, d)) {
        call->registered_again = true;
        if (!register_again(lane, call, earlier(call->deadline, limit(0)))) {
            set_state(lane, call, UNSENT);
            send_call(lane, call);
            return NULL;
        }
    }
    call->answered = true;
    shmserve_answer *answer = begin_answer(lane, call, d->final);
    answer->code = d->code, answer->http_status = d->status, answer->text = d->text, answer->receipt = d->receipt;
    answer->outputs = d->outputs, answer->output_count = d->output_count;
    answer->parameters = d->parameters, answer->parameter_count = d->parameter_count;
    if (d->final) {
        release(lane, call, false, false, false);
        set_state(lane, call, FREE);
    }
    return answer;
}

/* Take in what has come for calls that were given up, while no other is under way. */
static void take_late(shmserve_lane *lane) {
    size_t size;
    while (lane->fd >= 0 && !lane->live) {
        Outcome outcome = receive_now(lane->fd, lane->packet, &size);
        if (outcome == TIMEOUT) return;
        if (outcome == DONE) take_packet(lane, size);
        else lane_lost(lane, outcome == GONE ? SHMSERVE_ABORTED : SHMSERVE_PROTOCOL);
    }
}

/* Send credit, and cancellations for which the socket had no room. What has no room now is sent after the next packet:
 * the executor has requests to read, and answers them. */
static void send_due(shmserve_lane *lane) {
    for (size_t i = 0; i < lane->call_count; i++) {
        Call *call = &lane->calls[i];
        if (call->state != SENT && call->state != GIVEN_UP) continue;
        bool due = call->state == SENT && call->given;
        if (due && send_short(lane, "LaneCredit", call->number, call->given)) call->taken -= call->given, call->given = 0;
        if (atomic_load(&call->cancelled)) ask_to_end(lane, call);
    }
}

shmserve_code shmserve_credit(shmserve_lane *lane, uint64_t ticket, uint32_t answers, shmserve_error *error) {
    shmserve_code code = owned(lane->client, error);
    Call *call = code ? NULL : call_of(lane, ticket);
    if (!call || call->state != SENT || !answers) return code;
    uint32_t most = call->taken - call->given;
    if (answers > most) return fail(error, SHMSERVE_INVALID_ARGUMENT, "answers: %u were taken, not %u", most, answers);
    call->given += answers;
    send_due(lane);
    return SHMSERVE_OK;
}

shmserve_code shmserve_cancel(shmserve_lane *lane, uint64_t ticket, shmserve_error *error) {
    shmserve_code code = owned(lane->client, error);
    if (code) return code;
    pthread_mutex_lock(&lane->guard);
    for (size_t i = 0; i < lane->call_count; i++) {
        Call *call = &lane->calls[i];
        if (!call->number || (ticket && call->number != ticket)) continue;
        atomic_store(&call->cancelled, true);
        if (call->state == SENT) send_cancel(lane, call);
    }
    pthread_mutex_unlock(&lane->guard);
    return SHMSERVE_OK;
}

/* ---------------------------------------------------------------------------------------------- submit and take */

/* Return an entry for a call, or NULL. */
static Call *free_call(shmserve_lane *lane) {
    if (!lane->live) take_late(lane);
    if (lane->live >= UNDER_WAY) return NULL;
    for (size_t i = 0; i < lane->call_count; i++)
        if (lane->calls[i].state == FREE) return &lane->calls[i];
    pthread_mutex_lock(&lane->guard);
    Call *call = &lane->calls[lane->call_count]; /* there is one, as the server has UNDER_WAY requests at most */
    call->parts = &lane->parts[lane->call_count++];
    pthread_mutex_unlock(&lane->guard);
    return call;
}

shmserve_code shmserve_submit(shmserve_lane *lane, const shmserve_request *request, uint64_t *ticket, shmserve_error *error) {
    int64_t now = now_ns();
    shmserve_code code = owned(lane->client, error);
    if (code || (code = check(request, error))) return code;
    Call *call = free_call(lane);
    if (!call) return fail(error, SHMSERVE_RESOURCE_EXHAUSTED, "%d requests are under way", UNDER_WAY);
    bool limited = request->timeout_ns || request->deadline_ns;
    call->deadline = request->timeout_ns ? after(now, request->timeout_ns) : NEVER;
    if (request->deadline_ns) call->deadline = earlier(call->deadline, request->deadline_ns);
    if (!limited && !request->credit) call->deadline = after(now, after(lane->opened.timeout_ns, GRACE_NS));
    if (call->deadline <= now) return fail(error, SHMSERVE_DEADLINE_EXCEEDED, "the deadline has passed");
    if ((code = prepare(lane, call, request, error))) return code;
    if ((code = encode(lane, call, request, error))) return code;
    if (!limited) call->timeout_at = 0;
    call->user = request->user;
    call->credit = request->credit, call->hold_credit = request->hold_credit;
    call->attempts = call->taken = call->given = 0;
    call->cancel_sent = call->answered = call->died = call->registered_again = false;
    atomic_store(&call->cancelled, false);
    pthread_mutex_lock(&lane->guard);
    call->state = UNSENT, call->number = lane->last_number;
    pthread_mutex_unlock(&lane->guard);
    lane->live++;
    if (ticket) *ticket = call->number;
    send_unsent(lane, call->deadline);
    return SHMSERVE_OK;
}

/* Return the time of the next thing to do if nothing comes; NEVER if there is none. Without `tries`, an attempt to send
 * does not count. Another thread that cancels an unsent call wakes nobody: attempts notice that. */
static int64_t next_time(const shmserve_lane *lane, bool tries) {
    int64_t next = NEVER;
    for (size_t i = 0; i < lane->call_count; i++) {
        const Call *call = &lane->calls[i];
        if (call->state == FAILED || (call->state == UNSENT && atomic_load(&call->cancelled))) return 0;
        if (call->state == SENT || call->state == UNSENT) next = earlier(next, call->deadline);
        if (call->state == UNSENT && tries) next = earlier(next, lane->fd < 0 ? lane->retry_at : now_ns() + PAUSE_NS);
    }
    return next;
}

/* Return an answer that the library has itself: a failure, a cancellation, or a deadline that has passed. Until all has
 * been `received`, the answer of a call that the server has may be there. */
static const shmserve_answer *own_answer(shmserve_lane *lane, bool received) {
    int64_t now = now_ns();
    for (size_t i = 0; i < lane->call_count; i++) {
        Call *call = &lane->calls[i];
        if (call->state == UNSENT && atomic_load(&call->cancelled)) cancel_unsent(lane, call);
        if (call->state == FAILED) return failed_answer(lane, call, FREE);
        if ((call->state == UNSENT || (received && call->state == SENT)) && call->deadline <= now) return expire(lane, call);
    }
    return NULL;
}

static const shmserve_answer *take(shmserve_lane *lane, int64_t until) {
    for (size_t i = 0; i < lane->call_count; i++)
        if (!lane->calls[i].hold_credit) lane->calls[i].given = lane->calls[i].taken;
    bool received = false; /* all that had come; a peer that sends for ever does not count */
    for (size_t size, packets = 0;;) {
        const shmserve_answer *answer = own_answer(lane, received);
        if (answer) return answer;
        if (count_calls(lane, UNSENT)) {
            int64_t end = now_ns() + TRY_NS; /* a shorter attempt might never succeed */
            send_unsent(lane, earlier(end > until ? end : until, next_time(lane, false)));
            if ((answer = own_answer(lane, received))) return answer;
        }
        send_due(lane);
        if (received && (now_ns() >= until || !lane->live)) return NULL;
        if (!lane->live) take_late(lane);
        if (!lane->live) return NULL;
        int64_t wake = earlier(until, next_time(lane, true));
        if (lane->fd < 0) {
            wait_for(-1, 0, wake);
            received = true;
            continue;
        }
        Outcome outcome = receive(lane, wake, &size);
        received = outcome != DONE || ++packets > CALLS;
        if (outcome == DONE && (answer = take_packet(lane, size))) return answer;
        if (outcome == GONE || outcome == VIOLATION) lane_lost(lane, outcome == GONE ? SHMSERVE_ABORTED : SHMSERVE_PROTOCOL);
    }
}

shmserve_code shmserve_take(shmserve_lane *lane, int64_t timeout_ns, const shmserve_answer **answer, shmserve_error *error) {
    shmserve_code code = owned(lane->client, error);
    *answer = NULL;
    if (code) return code;
    if (timeout_ns < -1) return fail(error, SHMSERVE_INVALID_ARGUMENT, "timeout_ns: %lld", (long long)timeout_ns);
    *answer = take(lane, timeout_ns < 0 ? NEVER : after(now_ns(), timeout_ns));
    return SHMSERVE_OK;
}

shmserve_code shmserve_infer(shmserve_lane *lane, const shmserve_request *request, const shmserve_answer **result,
                             shmserve_error *error) {
    if (result) *result = NULL;
    if (lane->live) return fail(error, SHMSERVE_FAILED_PRECONDITION, "%zu requests are under way", lane->live);
    if (request->credit) return fail(error, SHMSERVE_INVALID_ARGUMENT, "credit: streams need shmserve_submit and shmserve_take");
    shmserve_code code = shmserve_submit(lane, request, NULL, error);
    if (code) return code;
    const shmserve_answer *answer = take(lane, NEVER);
    if (!answer) return fail(error, SHMSERVE_INTERNAL, "the request was lost");
    if (answer->code && error) {
        fail(error, answer->code, "%s", answer->text);
        error->http_status = answer->http_status;
    }
    if (result) *result = answer;
    return answer->code;
}

int shmserve_lane_fd(shmserve_lane *lane) {
    if (owned(lane->client, NULL)) return -1;
    if (lane->epoll < 0) {
        struct epoll_event event = {.events = EPOLLIN};
        lane->epoll = epoll_create1(EPOLL_CLOEXEC);
        if (lane->epoll >= 0 && lane->fd >= 0 && epoll_ctl(lane->epoll, EPOLL_CTL_ADD, lane->fd, &event)) {
            close(lane->epoll);
            lane->epoll = -1;
        }
    }
    return lane->epoll;
}

int shmserve_lane_poll_ms(const shmserve_lane *lane) {
    int64_t next = next_time(lane, true), now = now_ns();
    if (next == NEVER) return -1;
    if (next <= now) return 0;
    return (int)earlier((next - now + MS - 1) / MS, INT_MAX);
}
