/* Lane client in C: sends requests to a model with one FP32 input and one FP32 output over a lane,
 * with tensors in shared memory, and prints the median time. docs/shared_memory.md describes the wire format.
 *
 *     cc -O2 -o lane lane.c
 *     ./lane /run/shmserve-client/client.sock echo IN OUT 262144 1000
 *
 * Arguments: client socket, model, names of input and output, number of elements, number of requests.
 * The model must return its input unchanged, which the client checks. The exit status is 1 after an error.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define MOST (128 * 1024) /* bytes of a message */

static void fail(const char *what) {
    fprintf(stderr, "%s%s%s\n", what, errno ? ": " : "", errno ? strerror(errno) : "");
    exit(1);
}

/* ------------------------------------------------------------ writing MessagePack */

typedef struct {
    uint8_t bytes[MOST];
    size_t used;
} Message;

static void put(Message *m, const void *bytes, size_t count) {
    if (count > sizeof m->bytes - m->used) errno = 0, fail("the message is too long");
    memcpy(m->bytes + m->used, bytes, count);
    m->used += count;
}

static void put_tagged(Message *m, uint8_t tag, uint64_t value, int width) {
    uint8_t bytes[9] = {tag};
    for (int i = 0; i < width; i++) bytes[1 + i] = value >> 8 * (width - 1 - i);
    put(m, bytes, 1 + width);
}

static void put_array(Message *m, uint16_t items) { put_tagged(m, 0xdc, items, 2); }
static void put_uint(Message *m, uint64_t value) { put_tagged(m, 0xcf, value, 8); }

static void put_text(Message *m, const char *text) {
    size_t length = strlen(text);
    put_tagged(m, 0xda, length, 2);
    put(m, text, length);
}

static void put_window(Message *m, const char *region, uint64_t offset, uint64_t nbytes) {
    put_array(m, 3), put_text(m, region), put_uint(m, offset), put_uint(m, nbytes);
}

/* ------------------------------------------------------------ reading MessagePack */

typedef struct {
    const uint8_t *at, *end;
} Reader;

static uint64_t take(Reader *r, int width) {
    uint64_t value = 0;
    if (r->end - r->at < width) errno = 0, fail("the answer is cut short");
    while (width--) value = value << 8 | *r->at++;
    return value;
}

/* The head of the next value: its kind (n nil, b boolean, i integer, f float, s text or bytes,
 * a array, m map) and its value or length. */
static char head(Reader *r, uint64_t *value) {
    uint8_t tag = take(r, 1);
    *value = 0;
    if (tag < 0x80 || tag >= 0xe0) return *value = tag < 0x80 ? tag : (int8_t)tag, 'i';
    if (tag < 0x90) return *value = tag & 15, 'm';
    if (tag < 0xa0) return *value = tag & 15, 'a';
    if (tag < 0xc0) return *value = tag & 31, 's';
    switch (tag) {
    case 0xc0: return 'n';
    case 0xc2: case 0xc3: return *value = tag & 1, 'b';
    case 0xc4: case 0xd9: return *value = take(r, 1), 's';
    case 0xc5: case 0xda: return *value = take(r, 2), 's';
    case 0xc6: case 0xdb: return *value = take(r, 4), 's';
    case 0xca: return *value = take(r, 4), 'f';
    case 0xcb: return *value = take(r, 8), 'f';
    case 0xcc: case 0xd0: return *value = take(r, 1), 'i';
    case 0xcd: case 0xd1: return *value = take(r, 2), 'i';
    case 0xce: case 0xd2: return *value = take(r, 4), 'i';
    case 0xcf: case 0xd3: return *value = take(r, 8), 'i';
    case 0xdc: return *value = take(r, 2), 'a';
    case 0xdd: return *value = take(r, 4), 'a';
    case 0xde: return *value = take(r, 2), 'm';
    case 0xdf: return *value = take(r, 4), 'm';
    }
    errno = 0;
    fail("the answer is no MessagePack");
    return 0;
}

static uint64_t expect(Reader *r, char kind) {
    uint64_t value;
    errno = 0;
    if (head(r, &value) != kind) fail("the answer is none of ours");
    return value;
}

static const uint8_t *expect_text(Reader *r, uint64_t *length) {
    *length = expect(r, 's');
    if ((uint64_t)(r->end - r->at) < *length) fail("the answer is cut short");
    r->at += *length;
    return r->at - *length;
}

static void skip(Reader *r) {
    uint64_t value;
    char kind = head(r, &value);
    if (kind == 's' && (uint64_t)(r->end - r->at) < value) errno = 0, fail("the answer is cut short");
    if (kind == 's') r->at += value;
    if (kind == 'a' || kind == 'm')
        for (value *= kind == 'm' ? 2 : 1; value; value--) skip(r);
}

/* ------------------------------------------------------------ sockets */

static void send_message(int sock, const Message *m, int fd) {
    struct iovec part = {(void *)m->bytes, m->used};
    union { struct cmsghdr align; char bytes[CMSG_SPACE(sizeof(int))]; } control = {0};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (fd >= 0) {
        message.msg_control = control.bytes, message.msg_controllen = sizeof control.bytes;
        struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
        rights->cmsg_level = SOL_SOCKET, rights->cmsg_type = SCM_RIGHTS;
        rights->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(rights), &fd, sizeof fd);
    }
    if (sendmsg(sock, &message, MSG_NOSIGNAL) < 0) fail("sending");
}

/* Receives a message, which must be called `name`. `fd`, if given, gets the message's descriptor. */
static Reader receive(int sock, Message *m, const char *name, int *fd) {
    struct iovec part = {m->bytes, sizeof m->bytes};
    union { struct cmsghdr align; char bytes[CMSG_SPACE(sizeof(int))]; } control = {0};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.bytes,
                             .msg_controllen = sizeof control.bytes};
    ssize_t size = recvmsg(sock, &message, MSG_CMSG_CLOEXEC);
    if (size < 0) fail("receiving");
    errno = 0;
    if (size == 0) fail("the other end is gone");
    struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
    if (fd && rights) memcpy(fd, CMSG_DATA(rights), sizeof *fd);
    Reader r = {m->bytes, m->bytes + size};
    uint64_t length, items = expect(&r, 'a');
    const uint8_t *text = expect_text(&r, &length);
    if (length != strlen(name) || memcmp(text, name, length)) {
        if (length == 6 && !memcmp(text, "Failed", 6) && items == 3) {
            skip(&r);
            text = expect_text(&r, &length);
            fprintf(stderr, "%.*s\n", (int)length, text);
            exit(1);
        }
        fail("another answer than expected");
    }
    return r;
}

static int connect_to(const char *path) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int sock = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (sock < 0 || strlen(path) >= sizeof address.sun_path) fail("socket");
    strcpy(address.sun_path, path);
    struct timeval patience = {30, 0}; /* every wait has an end */
    setsockopt(sock, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(sock, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (connect(sock, (void *)&address, sizeof address)) fail("connecting");
    return sock;
}

/* ------------------------------------------------------------ regions and requests */

static float *make_region(int sock, Message *m, const char *name, size_t nbytes) {
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0 || posix_fallocate(fd, 0, nbytes)) fail("memory");
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)) fail("seals");
    float *memory = mmap(NULL, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) fail("mapping");
    m->used = 0;
    put_array(m, 4), put_text(m, "RegisterMemfd"), put_text(m, name);
    put_uint(m, 0), put_uint(m, nbytes);
    send_message(sock, m, fd);
    receive(sock, m, "Ok", NULL);
    close(fd);
    return memory;
}

static int open_lane(int sock, Message *m, const char *model) {
    int lane = -1;
    m->used = 0;
    put_array(m, 3), put_text(m, "OpenLane"), put_text(m, model), put_text(m, "");
    send_message(sock, m, -1);
    receive(sock, m, "LaneOpened", &lane);
    if (lane < 0) errno = 0, fail("no lane came along");
    struct timeval patience = {30, 0};
    setsockopt(lane, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    setsockopt(lane, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    return lane;
}

static void infer(int lane, Message *m, uint64_t number, char *const names[2],
                  char *const regions[2], uint64_t count) {
    m->used = 0;
    put_array(m, 4), put_text(m, "LaneRequest"), put_uint(m, number);
    put_array(m, 1), put_array(m, 4), put_text(m, names[0]), put_text(m, "FP32");
    put_array(m, 1), put_uint(m, count), put_window(m, regions[0], 0, 4 * count);
    put_array(m, 1), put_array(m, 2), put_text(m, names[1]);
    put_window(m, regions[1], 0, 4 * count);
    send_message(lane, m, -1);
    Reader r = receive(lane, m, "LaneAnswer", NULL);
    if (expect(&r, 'i') != number) fail("the answer to another request");
    skip(&r); /* outputs: at the requested places */
    uint64_t status = expect(&r, 'i'), length;
    skip(&r);
    const uint8_t *text = expect_text(&r, &length);
    if (status != 200) {
        fprintf(stderr, "%d: %.*s\n", (int)status, (int)length, text);
        exit(1);
    }
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    static Message message;
    char names[2][64], *regions[2] = {names[0], names[1]};
    if (argc != 7) errno = 0, fail("usage: lane CLIENT_SOCKET MODEL INPUT OUTPUT ELEMENTS REQUESTS");
    uint64_t count = strtoull(argv[5], NULL, 10), requests = strtoull(argv[6], NULL, 10);
    double *took = calloc(requests + !requests, sizeof *took);
    if (!took || !count) errno = 0, fail("nothing to do");
    int sock = connect_to(argv[1]);
    put_array(&message, 2), put_text(&message, "ClientHello"), put_uint(&message, 1);
    send_message(sock, &message, -1);
    receive(sock, &message, "ServerHello", NULL);
    for (int i = 0; i < 2; i++) snprintf(names[i], sizeof names[i], "lane-c-%d-%d", getpid(), i);
    float *in = make_region(sock, &message, regions[0], 4 * count);
    float *out = make_region(sock, &message, regions[1], 4 * count);
    int lane = open_lane(sock, &message, argv[2]);
    for (uint64_t i = 0; i < count; i++) in[i] = i % 65536;
    for (uint64_t n = 0; n < requests; n++) {
        struct timespec from, to;
        out[0] = out[count - 1] = -1;
        clock_gettime(CLOCK_MONOTONIC, &from);
        infer(lane, &message, n, argv + 3, regions, count);
        clock_gettime(CLOCK_MONOTONIC, &to);
        took[n] = (to.tv_sec - from.tv_sec) * 1e6 + (to.tv_nsec - from.tv_nsec) / 1e3;
    }
    if (memcmp(in, out, 4 * count)) errno = 0, fail("the model gave something else");
    qsort(took, requests, sizeof *took, by_value);
    printf("%llu bytes: %.1f us\n", (unsigned long long)(4 * count), took[requests / 2]);
    return 0;
}
