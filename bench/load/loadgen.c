/* A closed-loop HTTP/1.1 load generator: one thread and one kept-alive connection per
 * client, each sending the same request over and over and waiting for its answer.
 *
 *   loadgen --port N | --unix PATH  --request FILE  [--host ADDRESS] [--connections N]
 *           [--warmup SECONDS] [--duration SECONDS] [--count N]
 *           [--expect-length BYTES] [--expect-tail FILE]
 *
 * FILE holds the whole request, head and body. During the warm-up every body must end with
 * the bytes of --expect-tail; while measuring only status and length are checked, so that
 * the comparison costs the server no time. Prints one JSON object.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define HEAD_MAX 65536
#define MAX_ERRORS 20

struct blob {
    char *data;
    size_t size;
};

struct client {
    pthread_t thread;
    int fd;
    char *body; /* holds the head as well while it is being read */
    size_t capacity;
    uint32_t *micros;
    size_t samples, room;
    uint64_t first_start, last_end;
    long errors, answers; /* answers: those of the warm-up, too */
};

static struct blob request, tail;
static const char *host = "127.0.0.1", *unix_path;
static int port, connections = 1;
static double warmup = 1, duration = 5;
static long count;
static long expect_length = -1;
static atomic_long remaining, compared, first_status;
static pthread_barrier_t warm;
static char first_error[512];
static pthread_mutex_t error_lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void die(const char *what) {
    perror(what);
    exit(2);
}

static struct blob slurp(const char *path) {
    struct blob blob = {0};
    struct stat st;
    FILE *file = fopen(path, "rb");
    if (!file || fstat(fileno(file), &st))
        die(path);
    blob.size = (size_t)st.st_size;
    blob.data = malloc(blob.size + 1);
    if (!blob.data || fread(blob.data, 1, blob.size, file) != blob.size)
        die(path);
    fclose(file);
    return blob;
}

static void fail(struct client *c, const char *what, const char *detail, size_t size) {
    pthread_mutex_lock(&error_lock);
    if (!first_error[0]) {
        snprintf(first_error, sizeof first_error, "%s: %.*s", what,
                 (int)(size > 300 ? 300 : size), detail);
        for (char *p = first_error; *p; p++)
            if (*p == '"' || *p == '\\' || (unsigned char)*p < 32 || (unsigned char)*p > 126)
                *p = *p == '"' ? '\'' : '.';
    }
    pthread_mutex_unlock(&error_lock);
    c->errors++;
}

static bool dial(struct client *c) {
    int one = 1;
    if (unix_path) {
        struct sockaddr_un a = {.sun_family = AF_UNIX};
        strncpy(a.sun_path, unix_path, sizeof a.sun_path - 1);
        c->fd = socket(AF_UNIX, SOCK_STREAM, 0);
        return connect(c->fd, (struct sockaddr *)&a, sizeof a) == 0;
    }
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    inet_pton(AF_INET, host, &a.sin_addr);
    c->fd = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return connect(c->fd, (struct sockaddr *)&a, sizeof a) == 0;
}

static bool reconnect(struct client *c) {
    if (c->fd >= 0)
        close(c->fd);
    if (dial(c))
        return true;
    close(c->fd);
    c->fd = -1;
    return false;
}

static void send_request(struct client *c) {
    size_t sent = 0;
    while (sent < request.size) {
        ssize_t n = send(c->fd, request.data + sent, request.size - sent, MSG_NOSIGNAL);
        if (n <= 0)
            return; /* the answer may still say why */
        sent += (size_t)n;
    }
}

/* The value of a header field, or NULL; the head is NUL-terminated. */
static const char *field(const char *head, const char *name) {
    size_t length = strlen(name);
    for (const char *line = strstr(head, "\r\n"); line; line = strstr(line, "\r\n")) {
        line += 2;
        if (!strncasecmp(line, name, length) && line[length] == ':')
            return line + length + 1 + strspn(line + length + 1, " ");
    }
    return NULL;
}

/* One answer. Returns false when the connection cannot be used any more. */
static bool receive(struct client *c, bool compare) {
    size_t got = 0, head_size = 0, body_size = 0;
    char head[HEAD_MAX];
    while (!head_size) {
        ssize_t n = recv(c->fd, c->body + got, HEAD_MAX - 1 - got, 0);
        if (n <= 0) {
            fail(c, "connection closed in the head", strerror(n ? errno : 0), 40);
            return false;
        }
        got += (size_t)n;
        char *end = memmem(c->body, got, "\r\n\r\n", 4);
        if (end)
            head_size = (size_t)(end - c->body) + 4;
        else if (got >= HEAD_MAX - 1) {
            fail(c, "head too large", "", 0);
            return false;
        }
    }
    memcpy(head, c->body, head_size);
    head[head_size] = 0;
    const char *length = field(head, "content-length"), *connection = field(head, "connection");
    if (!length) {
        fail(c, "no Content-Length", head, head_size);
        return false;
    }
    body_size = strtoul(length, NULL, 10);
    if (head_size + body_size > c->capacity) {
        c->capacity = head_size + body_size + HEAD_MAX;
        c->body = realloc(c->body, c->capacity);
        if (!c->body)
            die("realloc");
    }
    while (got < head_size + body_size) {
        ssize_t n = recv(c->fd, c->body + got, head_size + body_size - got, MSG_WAITALL);
        if (n <= 0) {
            fail(c, "connection closed in the body", strerror(n ? errno : 0), 40);
            return false;
        }
        got += (size_t)n;
    }
    const char *body = c->body + head_size;
    long status = strtol(head + 9, NULL, 10);
    if (status != 200) {
        char what[32];
        snprintf(what, sizeof what, "HTTP %ld", status);
        atomic_store(&first_status, status);
        fail(c, what, body, body_size);
    } else if (expect_length >= 0 && body_size != (size_t)expect_length)
        fail(c, "wrong body length", length, strcspn(length, "\r"));
    else if (compare && tail.size) {
        if (body_size < tail.size ||
            memcmp(body + body_size - tail.size, tail.data, tail.size) != 0)
            fail(c, "wrong body", "", 0);
        atomic_fetch_add(&compared, 1);
    }
    return !(connection && !strncasecmp(connection, "close", 5));
}

static void record(struct client *c, uint64_t start, uint64_t end) {
    if (c->samples == c->room) {
        c->room = c->room ? c->room * 2 : 1024;
        c->micros = realloc(c->micros, c->room * sizeof *c->micros);
        if (!c->micros)
            die("realloc");
    }
    if (!c->samples)
        c->first_start = start;
    c->last_end = end;
    c->micros[c->samples++] = (uint32_t)((end - start) / 1000);
}

static void drive(struct client *c, double seconds, bool measure) {
    uint64_t until = now_ns() + (uint64_t)(seconds * 1e9);
    do {
        if (measure && count && atomic_fetch_sub(&remaining, 1) <= 0)
            return;
        if (c->fd < 0 && !reconnect(c)) {
            fail(c, "connect", strerror(errno), 40);
            continue;
        }
        long before = c->errors;
        uint64_t start = now_ns();
        send_request(c);
        bool usable = receive(c, !measure);
        uint64_t end = now_ns();
        c->answers += c->errors == before;
        if (measure && c->errors == before)
            record(c, start, end);
        if (!usable) {
            close(c->fd);
            c->fd = -1;
        }
    } while (c->errors < MAX_ERRORS && ((measure && count) || now_ns() < until));
}

static void *client_main(void *argument) {
    struct client *c = argument;
    c->capacity = HEAD_MAX;
    c->body = malloc(c->capacity);
    c->fd = -1;
    drive(c, warmup, false);
    pthread_barrier_wait(&warm);
    drive(c, duration, true);
    if (c->fd >= 0)
        close(c->fd);
    return NULL;
}

static int ascending(const void *a, const void *b) {
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

static void report(struct client *clients) {
    size_t samples = 0, at = 0;
    long errors = 0, answers = 0;
    uint64_t first = UINT64_MAX, last = 0;
    for (int i = 0; i < connections; i++)
        samples += clients[i].samples;
    uint32_t *all = malloc((samples + 1) * sizeof *all);
    all[0] = 0;
    for (int i = 0; i < connections; i++) {
        struct client *c = &clients[i];
        errors += c->errors;
        answers += c->answers;
        if (!c->samples)
            continue;
        memcpy(all + at, c->micros, c->samples * sizeof *all);
        at += c->samples;
        first = c->first_start < first ? c->first_start : first;
        last = c->last_end > last ? c->last_end : last;
    }
    qsort(all, samples, sizeof *all, ascending);
    double seconds = samples ? (double)(last - first) / 1e9 : 0, sum = 0;
    for (size_t i = 0; i < samples; i++)
        sum += all[i];
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double cpu = (double)usage.ru_utime.tv_sec + (double)usage.ru_stime.tv_sec +
                 (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec) / 1e6;
#define AT(q) (samples ? all[(size_t)((double)(samples - 1) * (q))] : 0)
    printf("{\"connections\": %d, \"requests\": %zu, \"answers\": %ld, \"seconds\": %.3f, \"per_s\": %.2f, "
           "\"mean_us\": %.1f, \"p50_us\": %u, \"p90_us\": %u, \"p99_us\": %u, \"max_us\": %u, "
           "\"errors\": %ld, \"first_error\": \"%s\", \"status\": %ld, \"compared\": %ld, "
           "\"client_cpu_s\": %.2f}\n",
           connections, samples, answers, seconds, seconds > 0 ? (double)samples / seconds : 0,
           samples ? sum / (double)samples : 0, AT(0.5), AT(0.9), AT(0.99), AT(1.0), errors,
           first_error, atomic_load(&first_status), atomic_load(&compared), cpu);
}

static void parse(int argc, char **argv) {
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (!strcmp(name, "--host")) host = value;
        else if (!strcmp(name, "--port")) port = atoi(value);
        else if (!strcmp(name, "--unix")) unix_path = value;
        else if (!strcmp(name, "--request")) request = slurp(value);
        else if (!strcmp(name, "--connections")) connections = atoi(value);
        else if (!strcmp(name, "--warmup")) warmup = atof(value);
        else if (!strcmp(name, "--duration")) duration = atof(value);
        else if (!strcmp(name, "--count")) count = atol(value);
        else if (!strcmp(name, "--expect-length")) expect_length = atol(value);
        else if (!strcmp(name, "--expect-tail")) tail = slurp(value);
        else {
            fprintf(stderr, "unknown option %s\n", name);
            exit(2);
        }
    }
    if (!request.size || (!port && !unix_path) || connections < 1) {
        fprintf(stderr, "usage: loadgen --port N | --unix PATH --request FILE [options]\n");
        exit(2);
    }
}

int main(int argc, char **argv) {
    parse(argc, argv);
    atomic_store(&remaining, count);
    struct client *clients = calloc((size_t)connections, sizeof *clients);
    pthread_barrier_init(&warm, NULL, (unsigned)connections);
    for (int i = 0; i < connections; i++)
        if (pthread_create(&clients[i].thread, NULL, client_main, &clients[i]))
            die("pthread_create");
    for (int i = 0; i < connections; i++)
        pthread_join(clients[i].thread, NULL);
    report(clients);
    return 0;
}
