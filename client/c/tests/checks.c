/* Checks of libshmserve against a server (tests/integration/test_client_c.py), one per name:
 *
 *     checks NAME CLIENT_SOCKET [ARGUMENT ...]
 *
 * Uses only the public header. The exit status is 1, and the line is printed, where a check fails.
 */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include "../shmserve.h"

#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static shmserve_client *client;
static shmserve_error error;

#define CHECK(condition)                                                                                              \
    do {                                                                                                              \
        if (!(condition)) {                                                                                           \
            fprintf(stderr, "line %d: %s (last error: %s: %s)\n", __LINE__, #condition,                               \
                    shmserve_code_name(error.code), error.text);                                                      \
            exit(1);                                                                                                  \
        }                                                                                                             \
    } while (0)

#define MS INT64_C(1000000)

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 * MS + now.tv_nsec;
}

static shmserve_lane *open_lane(const char *model) {
    shmserve_lane *lane;
    shmserve_code code = shmserve_lane_open(client, model, "", 30000 * MS, &lane, &error);
    CHECK(code == SHMSERVE_OK);
    return lane;
}

static float *buffer(size_t count) {
    float *floats = shmserve_alloc(client, count * sizeof *floats, &error);
    CHECK(floats && (uintptr_t)floats % 4096 == 0);
    return floats;
}

/* A request with one FP32 input and at most one output. */
typedef struct {
    int64_t shape[1];
    shmserve_tensor input;
    shmserve_output output;
    shmserve_request request;
    float value; /* of the first element, where that is compared */
} Floats;

static const shmserve_request *floats_request(Floats *f, const float *in, size_t count, float *out) {
    f->shape[0] = (int64_t)count;
    f->input = (shmserve_tensor){"IN", SHMSERVE_FP32, 1, f->shape, in, count * sizeof *in};
    f->output = (shmserve_output){"OUT", out, out ? count * sizeof *out : 0};
    f->request = (shmserve_request){.inputs = &f->input, .input_count = 1, .outputs = &f->output, .output_count = 1};
    return &f->request;
}

/* A request for the models that obey a command. */
typedef struct {
    uint8_t bytes[512];
    int64_t shape[1];
    shmserve_tensor input;
    shmserve_output output;
    shmserve_request request;
} Command;

static shmserve_request *command_request(Command *c, const char *text, const char *output) {
    shmserve_bytes element = {text, strlen(text)};
    size_t size = shmserve_bytes_encode(c->bytes, sizeof c->bytes, &element, 1);
    CHECK(size == shmserve_bytes_size(&element, 1) && size == 4 + element.size);
    c->shape[0] = 1;
    c->input = (shmserve_tensor){"COMMAND", SHMSERVE_BYTES, 1, c->shape, c->bytes, size};
    c->output = (shmserve_output){.name = output};
    c->request = (shmserve_request){.inputs = &c->input, .input_count = 1, .outputs = &c->output, .output_count = 1};
    return &c->request;
}

static const shmserve_answer *next_answer(shmserve_lane *lane) {
    const shmserve_answer *answer = NULL;
    shmserve_code code = shmserve_take(lane, 60000 * MS, &answer, &error);
    CHECK(code == SHMSERVE_OK && answer);
    return answer;
}

/* ---------------------------------------------------------------------------------------------- single calls */

/* Every datatype, inputs and outputs in messages, in memory of the pool, and inputs in other memory. */
static void datatypes(void) {
    enum { FIRST = SHMSERVE_BOOL, LAST = SHMSERVE_BF16, COUNT = LAST - FIRST + 1 };
    static char names[2][COUNT][16];
    shmserve_tensor inputs[COUNT];
    shmserve_output outputs[COUNT];
    uint8_t *pool = shmserve_alloc(client, 1 << 20, &error), *other = malloc(1 << 20);
    CHECK(pool && other);
    shmserve_lane *lane = open_lane("mirror");
    for (int round = 0; round < 3; round++) { /* 0: in messages; 1: in the pool; 2: large inputs from elsewhere */
        int64_t elements = round == 2 ? 5000 : 5, shape[] = {elements};
        uint8_t *at = round == 1 ? pool : other, *to = pool + (1 << 19);
        for (int i = 0; i < COUNT; i++) {
            shmserve_datatype datatype = (shmserve_datatype)(FIRST + i);
            size_t size = shmserve_datatype_size(datatype), nbytes = (size_t)elements * size;
            CHECK(shmserve_datatype_from_name(shmserve_datatype_name(datatype)) == datatype);
            snprintf(names[0][i], 16, "IN_%s", shmserve_datatype_name(datatype));
            snprintf(names[1][i], 16, "OUT_%s", shmserve_datatype_name(datatype));
            if (datatype == SHMSERVE_BYTES) {
                shmserve_bytes texts[5000];
                for (int64_t k = 0; k < elements; k++) texts[k] = (shmserve_bytes){"abcdef", (size_t)(k % 7)};
                nbytes = shmserve_bytes_encode(at, 1 << 18, texts, (size_t)elements);
                CHECK(nbytes);
            } else
                for (size_t k = 0; k < nbytes; k++)
                    at[k] = datatype == SHMSERVE_BOOL ? k % 2 : k % size ? (uint8_t)k : (uint8_t)(k & 0x3f);
            inputs[i] = (shmserve_tensor){names[0][i], datatype, 1, shape, at, nbytes};
            outputs[i] = (shmserve_output){names[1][i], round ? to : NULL, round ? nbytes + 64 : 0};
            at += nbytes, to += (nbytes + 127) & ~(size_t)63;
        }
        shmserve_parameter parameters[] = {
            {"b", SHMSERVE_IS_BOOL, {.boolean = true}},     {"i", SHMSERVE_IS_INT, {.integer = -7}},
            {"d", SHMSERVE_IS_DOUBLE, {.number = 0.5}}, {"s", SHMSERVE_IS_STRING, {.string = "text"}},
        };
        shmserve_request request = {.inputs = inputs, .input_count = COUNT, .outputs = outputs, .output_count = COUNT,
                                    .parameters = parameters, .parameter_count = 4, .id = "an id", .user = lane};
        const shmserve_answer *answer;
        CHECK(!shmserve_infer(lane, &request, &answer, &error));
        CHECK(answer->output_count == COUNT && answer->final && answer->user == lane && answer->attempts == 1);
        for (int i = 0; i < COUNT; i++) {
            const shmserve_tensor *output = &answer->outputs[i];
            CHECK(!strcmp(output->name, names[1][i]) && output->datatype == inputs[i].datatype);
            CHECK(output->rank == 1 && output->shape[0] == elements && output->nbytes == inputs[i].nbytes);
            CHECK(!memcmp(output->data, inputs[i].data, output->nbytes));
            CHECK(round ? output->data == outputs[i].data : (uintptr_t)output->data % 64 == 0);
        }
        CHECK((answer->receipt.inline_bytes > 0) == !round);
        CHECK(answer->receipt.compute_ns > 0);
    }
    CHECK(!strcmp(shmserve_lane_version(lane), "1") && *shmserve_lane_instance(lane));
    shmserve_lane_close(lane);
    free(other);
}

/* More in messages than the sockets hold, both ways: nothing waits for the other end to read. */
static void full_sockets(void) {
    enum { COUNT = SHMSERVE_BF16, SIZE = 4000 };
    static const uint8_t zeros[SIZE];
    char names[COUNT][16];
    int64_t shapes[COUNT];
    shmserve_tensor inputs[COUNT];
    for (int i = 0; i < COUNT; i++) {
        shmserve_datatype datatype = (shmserve_datatype)(i + 1);
        size_t size = shmserve_datatype_size(datatype);
        snprintf(names[i], 16, "IN_%s", shmserve_datatype_name(datatype));
        shapes[i] = (int64_t)(SIZE / (size ? size : 4)); /* BYTES: a text without bytes takes 4 */
        inputs[i] = (shmserve_tensor){names[i], datatype, 1, &shapes[i], zeros, SIZE};
    }
    shmserve_lane *lane = open_lane("mirror");
    shmserve_request request = {.inputs = inputs, .input_count = COUNT};
    for (int i = 0; i < SHMSERVE_MAX_UNDER_WAY; i++) CHECK(!shmserve_submit(lane, &request, NULL, &error));
    usleep(300000);
    for (int i = 0; i < SHMSERVE_MAX_UNDER_WAY; i++) {
        const shmserve_answer *answer = next_answer(lane);
        CHECK(!answer->code && answer->output_count == COUNT && answer->attempts == 1);
    }
    shmserve_lane_close(lane);
}

static void refusals(void) {
    float *in = buffer(1024), *out = buffer(1024), elsewhere[2000] = {0};
    shmserve_lane *lane = open_lane("echo"), *none;
    Floats f;
    CHECK(shmserve_lane_open(client, "nope", "", 0, &none, &error) == SHMSERVE_NOT_FOUND && !none);
    CHECK(error.http_status == 404 && strstr(error.text, "unknown model: 'nope'"));
    CHECK(shmserve_lane_open(client, "echo", "9", 0, &none, &error) == SHMSERVE_NOT_FOUND);
    floats_request(&f, in, 1024, elsewhere);
    CHECK(shmserve_infer(lane, &f.request, NULL, &error) == SHMSERVE_INVALID_ARGUMENT && strstr(error.text, "shmserve_alloc"));
    floats_request(&f, in, 1 << 20, out);
    CHECK(shmserve_infer(lane, &f.request, NULL, &error) == SHMSERVE_INVALID_ARGUMENT && strstr(error.text, "beyond"));
    floats_request(&f, in, 1024, out);
    f.input.name = "X";
    CHECK(shmserve_infer(lane, &f.request, NULL, &error) == SHMSERVE_INVALID_ARGUMENT && error.http_status == 400);
    CHECK(strstr(error.text, "'X'"));
    floats_request(&f, in, 1024, out);
    f.output.nbytes = 100;
    CHECK(shmserve_infer(lane, &f.request, NULL, &error) == SHMSERVE_INVALID_ARGUMENT && strstr(error.text, "should be at least"));
    floats_request(&f, elsewhere, 2000, NULL);
    CHECK(shmserve_infer(lane, &f.request, NULL, &error) == SHMSERVE_INVALID_ARGUMENT && strstr(error.text, "no window"));
    f.input.datatype = (shmserve_datatype)99;
    CHECK(shmserve_infer(lane, &f.request, NULL, NULL) == SHMSERVE_INVALID_ARGUMENT);
    f.request.input_count = 1000;
    CHECK(shmserve_infer(lane, &f.request, NULL, &error) == SHMSERVE_INVALID_ARGUMENT);
    CHECK(!shmserve_infer(lane, floats_request(&f, in, 1024, out), NULL, &error));
    CHECK(!shmserve_alloc(client, (size_t)1 << 60, &error) && error.code == SHMSERVE_RESOURCE_EXHAUSTED);
    CHECK(!shmserve_alloc(client, (size_t)2 << 30, &error) && error.code == SHMSERVE_RESOURCE_EXHAUSTED);
    shmserve_free(client, in);
    CHECK(shmserve_alloc(client, 4096, &error) == in); /* kept for later */
    CHECK(!shmserve_renew(client, out, &error));
    CHECK(shmserve_renew(client, out + 1, &error) == SHMSERVE_INVALID_ARGUMENT);
    CHECK(!shmserve_infer(lane, &f.request, NULL, &error));
    CHECK(!memcmp(in, out, 4096));
    shmserve_lane_close(lane);
    shmserve_lane_close(NULL);
    shmserve_free(client, NULL);
}

/* More buffers than may be at once, and more memory: unused ones make room. */
static void pool(void) {
    static void *buffers[256];
    size_t count = 0;
    while (count < 256 && (buffers[count] = shmserve_alloc(client, 16384, &error))) count++;
    CHECK(count > 200); /* the server's own limit may be lower */
    for (size_t i = 0; i < count; i++) memset(buffers[i], (int)i, 16384);
    for (size_t i = 0; i < count; i += 2) shmserve_free(client, buffers[i]);
    void *large = shmserve_alloc(client, 1 << 20, &error);
    CHECK(large);
    memset(large, 1, 1 << 20);
    for (size_t i = 1; i < count; i += 2) {
        CHECK(*(uint8_t *)buffers[i] == (uint8_t)i);
        shmserve_free(client, buffers[i]);
    }
    float *in = buffer(1 << 18), *out = buffer(1 << 18);
    shmserve_lane *lane = open_lane("echo");
    Floats f;
    for (int i = 0; i < 1 << 18; i++) in[i] = (float)i;
    CHECK(!shmserve_infer(lane, floats_request(&f, in, 1 << 18, out), NULL, &error));
    CHECK(!memcmp(in, out, 1 << 20));
    shmserve_lane_close(lane);
}

/* ----------------------------------------------------------------------------------------------------- streams */

static void streams(void) {
    shmserve_lane *lane = open_lane("teller");
    Command c;
    shmserve_request *request = command_request(&c, "count:100", "N");
    CHECK(shmserve_infer(lane, request, NULL, &error) == SHMSERVE_UNIMPLEMENTED); /* without credit */
    request->credit = 8;
    CHECK(shmserve_infer(lane, request, NULL, &error) == SHMSERVE_INVALID_ARGUMENT);
    uint64_t ticket;
    CHECK(!shmserve_submit(lane, request, &ticket, &error) && ticket);
    CHECK(shmserve_infer(lane, request, NULL, &error) && shmserve_under_way(lane) == 1);
    const shmserve_answer *answer;
    for (int64_t i = 0; i < 100; i++) {
        answer = next_answer(lane);
        int64_t n;
        CHECK(answer->code == SHMSERVE_OK && answer->ticket == ticket && answer->output_count == 1);
        memcpy(&n, answer->outputs[0].data, sizeof n);
        CHECK(n == i);
    }
    if (!answer->final) CHECK(next_answer(lane)->final);
    CHECK(!shmserve_under_way(lane));
    CHECK(!shmserve_take(lane, -1, &answer, &error) && !answer);

    /* answers of 1 MiB, one at a time in a window */
    uint8_t *window = shmserve_alloc(client, 1 << 20, &error);
    request = command_request(&c, "big:3", "DATA");
    c.output.data = window, c.output.nbytes = 1 << 20;
    request->credit = 1;
    CHECK(window);
    memset(window, 255, 1 << 20);
    CHECK(!shmserve_submit(lane, request, NULL, &error));
    int count = 0;
    do {
        answer = next_answer(lane);
        CHECK(answer->code == SHMSERVE_OK);
        if (!answer->output_count) continue;
        CHECK(answer->outputs[0].data == window && answer->outputs[0].nbytes == 1 << 20);
        CHECK(window[0] == 0 && window[(1 << 20) - 1] == 0);
        memset(window, 255, 1 << 20); /* the next answer comes after the next take */
        count++;
    } while (!answer->final);
    CHECK(count == 3);

    /* texts in a window: the size is that of the elements; an answer's error is its own */
    request = command_request(&c, "texts:3,70000,5", "TEXT");
    c.output.data = window, c.output.nbytes = 8192;
    request->credit = 1;
    CHECK(!shmserve_submit(lane, request, NULL, &error));
    size_t sizes[] = {3, 0, 5, 0};
    for (int i = 0; i < 4; i++) {
        answer = next_answer(lane);
        CHECK((answer->code == SHMSERVE_INVALID_ARGUMENT) == (i == 1) && !answer->final);
        if (i == 1) continue;
        size_t offset = 0;
        shmserve_bytes element;
        CHECK(shmserve_bytes_next(answer->outputs[0].data, answer->outputs[0].nbytes, &offset, &element));
        CHECK(element.size == sizes[i] && offset == answer->outputs[0].nbytes);
        CHECK(!shmserve_bytes_next(answer->outputs[0].data, answer->outputs[0].nbytes, &offset, &element));
    }
    CHECK(next_answer(lane)->final);

    /* credit that the caller gives: no answer comes without */
    request = command_request(&c, "count:5", "N");
    request->credit = 2, request->hold_credit = true;
    CHECK(!shmserve_submit(lane, request, &ticket, &error));
    next_answer(lane), next_answer(lane);
    CHECK(!shmserve_take(lane, 300 * MS, &answer, &error) && !answer);
    CHECK(shmserve_credit(lane, ticket, 3, &error) == SHMSERVE_INVALID_ARGUMENT);
    CHECK(!shmserve_credit(lane, ticket, 2, &error));
    next_answer(lane), next_answer(lane);
    CHECK(!shmserve_credit(lane, ticket, 2, &error));
    while (!next_answer(lane)->final) CHECK(!shmserve_credit(lane, ticket, 1, &error));

    /* the model's error ends a stream; so does a cancellation; two streams at a time */
    request = command_request(&c, "throw:1", "N");
    request->credit = 4;
    CHECK(!shmserve_submit(lane, request, NULL, &error));
    CHECK(next_answer(lane)->code == SHMSERVE_OK);
    answer = next_answer(lane);
    CHECK(answer->final && answer->code == SHMSERVE_INTERNAL && strstr(answer->text, "no such luck"));
    request = command_request(&c, "slowly:1000000", "N");
    request->credit = 4;
    uint64_t tickets[2];
    for (int i = 0; i < 2; i++) CHECK(!shmserve_submit(lane, request, &tickets[i], &error));
    for (int i = 0; i < 6; i++) CHECK(!next_answer(lane)->final);
    CHECK(!shmserve_cancel(lane, tickets[0], &error));
    do answer = next_answer(lane);
    while (!answer->final);
    CHECK(answer->ticket == tickets[0] && shmserve_under_way(lane) == 1);
    CHECK(answer->code == SHMSERVE_OK || answer->code == SHMSERVE_CANCELLED);
    CHECK(!next_answer(lane)->final);
    shmserve_lane_close(lane); /* ends the other */
}

/* ------------------------------------------------------------------------------------------ time and cancellation */

static atomic_bool over;

/* Cancel until the other thread's call has ended: it may begin late. */
static void *cancel_soon(void *lane) {
    do {
        usleep(100000);
        CHECK(!shmserve_cancel(lane, 0, NULL));
    } while (!atomic_load(&over));
    return NULL;
}

/* Have a call give up while the model is running. Where the model has not begun in time, the server itself answers. */
static const shmserve_answer *give_up(shmserve_lane *lane, shmserve_request *request) {
    const shmserve_answer *answer;
    for (request->timeout_ns = 50 * MS;; request->timeout_ns += 50 * MS) {
        CHECK(shmserve_infer(lane, request, &answer, &error) == SHMSERVE_DEADLINE_EXCEEDED && answer);
        if (!answer->http_status) return answer;
    }
}

static void deadlines(void) {
    shmserve_lane *lane = open_lane("misbehaving");
    Command c;
    float *out = buffer(1000);
    shmserve_request *request = command_request(&c, "sleep:2", "OUT");
    c.output.data = out, c.output.nbytes = 4000;
    const shmserve_answer *answer = give_up(lane, request);
    CHECK(answer->final && strstr(error.text, "in time"));
    /* the server may still write there: the buffer is renewed; a part of it is refused */
    c.output.data = out + 1, c.output.nbytes = 40;
    CHECK(shmserve_infer(lane, request, &answer, &error) == SHMSERVE_FAILED_PRECONDITION && !answer);
    request = command_request(&c, "ok:3", "OUT");
    c.output.data = out, c.output.nbytes = 4000;
    memset(out, 255, 4000);
    CHECK(!shmserve_infer(lane, request, &answer, &error) && out[0] == out[2] && out[0] > 0);
    CHECK(answer->outputs[0].nbytes == 12);
    request->deadline_ns = now_ns() - 1;
    CHECK(shmserve_infer(lane, request, &answer, &error) == SHMSERVE_DEADLINE_EXCEEDED && !answer);
    request->deadline_ns = now_ns() + 60000 * MS;
    CHECK(!shmserve_infer(lane, request, &answer, &error));

    /* the late answer makes the buffer usable again */
    command_request(&c, "sleep:1.5", "OUT");
    c.output.data = out, c.output.nbytes = 4000;
    give_up(lane, &c.request);
    struct pollfd late = {.fd = shmserve_lane_fd(lane), .events = POLLIN};
    CHECK(poll(&late, 1, 60000) == 1);
    CHECK(!shmserve_take(lane, 0, &answer, &error) && !answer);
    CHECK(poll(&late, 1, 0) == 0);
    command_request(&c, "ok:3", "OUT");
    c.output.data = out + 10, c.output.nbytes = 12;
    CHECK(!shmserve_infer(lane, &c.request, NULL, &error));

    /* from another thread, while this one waits */
    pthread_t thread;
    command_request(&c, "sleep:1", "OUT");
    CHECK(!pthread_create(&thread, NULL, cancel_soon, lane));
    shmserve_code code = shmserve_infer(lane, &c.request, NULL, &error);
    CHECK(code == SHMSERVE_OK || code == SHMSERVE_CANCELLED);
    atomic_store(&over, true);
    pthread_join(thread, NULL);
    CHECK(!shmserve_cancel(lane, 12345, &error));
    /* in the queue, where the executor may read the request before its cancellation */
    uint64_t ticket;
    command_request(&c, "sleep:0.2", "OUT");
    CHECK(!shmserve_submit(lane, &c.request, NULL, &error));
    command_request(&c, "ok", "OUT");
    CHECK(!shmserve_submit(lane, &c.request, &ticket, &error));
    CHECK(!shmserve_cancel(lane, ticket, &error));
    for (int i = 0; i < 2; i++) {
        answer = next_answer(lane);
        CHECK(answer->code == SHMSERVE_OK || (answer->ticket == ticket && answer->code == SHMSERVE_CANCELLED));
    }
    shmserve_lane_close(lane);
    shmserve_free(client, out);
}

/* ---------------------------------------------------------------------------------------- several at a time */

static void poll_loop(void) {
    enum { LANES = 2, EACH = 40, AT_A_TIME = 8 };
    shmserve_lane *lanes[LANES] = {open_lane("echo"), open_lane("pair")};
    float *in = buffer(2048), *out = buffer(LANES * AT_A_TIME * 2048);
    static Floats requests[LANES][AT_A_TIME];
    int sent[LANES] = {0}, taken[LANES] = {0};
    for (int i = 0; i < 2048; i++) in[i] = (float)i;
    for (int k = 0; k < LANES; k++) {
        CHECK(shmserve_lane_fd(lanes[k]) >= 0 && shmserve_lane_fd(lanes[k]) == shmserve_lane_fd(lanes[k]));
        CHECK(shmserve_lane_poll_ms(lanes[k]) == -1);
    }
    while (taken[0] + taken[1] < LANES * EACH) {
        struct pollfd fds[LANES];
        int timeout = 30000;
        for (int k = 0; k < LANES; k++) {
            while (sent[k] < EACH && sent[k] - taken[k] < AT_A_TIME) {
                int slot = sent[k] % AT_A_TIME;
                Floats *f = &requests[k][slot];
                floats_request(f, in, 2048, out + (k * AT_A_TIME + slot) * 2048);
                f->request.user = f;
                CHECK(!shmserve_submit(lanes[k], &f->request, NULL, &error));
                sent[k]++;
            }
            fds[k] = (struct pollfd){.fd = shmserve_lane_fd(lanes[k]), .events = POLLIN};
            int next = shmserve_lane_poll_ms(lanes[k]);
            if (next >= 0 && next < timeout) timeout = next;
        }
        CHECK(poll(fds, LANES, timeout) > 0 || timeout < 30000);
        for (int k = 0; k < LANES; k++)
            for (const shmserve_answer *answer;;) {
                CHECK(!shmserve_take(lanes[k], 0, &answer, &error));
                if (!answer) break;
                CHECK(answer->code == SHMSERVE_OK);
                Floats *f = answer->user;
                const float *result = f->output.data;
                CHECK(result[100] == in[100] + (float)k && result[2047] == in[2047] + (float)k);
                memset(f->output.data, 0, 8192);
                taken[k]++;
            }
    }
    /* as many as may be, and one more */
    Floats *f = &requests[0][0];
    floats_request(f, in, 4, NULL);
    for (int i = 0; i < SHMSERVE_MAX_UNDER_WAY; i++) CHECK(!shmserve_submit(lanes[0], &f->request, NULL, &error));
    CHECK(shmserve_submit(lanes[0], &f->request, NULL, &error) == SHMSERVE_RESOURCE_EXHAUSTED);
    for (int i = 0; i < SHMSERVE_MAX_UNDER_WAY; i++) CHECK(!next_answer(lanes[0])->code);
    for (int k = 0; k < LANES; k++) shmserve_lane_close(lanes[k]);
}

static void *one_thread(void *argument) {
    long number = *(long *)argument;
    shmserve_error mine;
    shmserve_lane *lane;
    if (shmserve_lane_open(client, "pair", "", 30000 * MS, &lane, &mine)) return "no lane";
    for (int round = 0; round < 50; round++) {
        float *in = shmserve_alloc(client, 20000, &mine), *out = shmserve_alloc(client, 20000, &mine);
        if (!in || !out) return "no memory";
        for (int i = 0; i < 5000; i++) in[i] = (float)(number * 10000 + i);
        Floats f;
        if (shmserve_infer(lane, floats_request(&f, in, 5000, out), NULL, &mine)) return "no answer";
        for (int i = 0; i < 5000; i++)
            if (out[i] != in[i] + 1) return "another's answer";
        shmserve_free(client, in);
        shmserve_free(client, out);
    }
    shmserve_lane_close(lane);
    return NULL;
}

static void threads(void) {
    enum { THREADS = 6 };
    pthread_t started[THREADS];
    long numbers[THREADS];
    for (long i = 0; i < THREADS; i++) {
        numbers[i] = i;
        CHECK(!pthread_create(&started[i], NULL, one_thread, &numbers[i]));
    }
    for (int i = 0; i < THREADS; i++) {
        void *problem;
        CHECK(!pthread_join(started[i], &problem));
        if (problem) fprintf(stderr, "thread %d: %s\n", i, (const char *)problem), exit(1);
    }
}

/* ----------------------------------------------------------------------------------------- deaths and restarts */

/* Call a model until the standard input ends; then every lane must work. Prints how often each code was returned. */
static void steady(const char *model) {
    float *in = buffer(4096), *out = buffer(4096), small[16];
    shmserve_lane *lane = open_lane(model);
    int counts[17] = {0}, again = 0;
    float add = strcmp(model, "pair") ? 0 : 1;
    struct pollfd input = {.fd = 0, .events = POLLIN};
    bool inlined = false;
    puts("begun"), fflush(stdout);
    for (int n = 0; !poll(&input, 1, 1); n++, inlined = !inlined) {
        size_t count = inlined ? 16 : 4096;
        Floats f;
        in[7] = (float)n;
        floats_request(&f, in, count, inlined ? NULL : out);
        if (inlined) f.input.data = memcpy(small, in, sizeof small);
        f.request.timeout_ns = 120000 * MS;
        const shmserve_answer *answer;
        shmserve_code code = shmserve_infer(lane, &f.request, &answer, &error);
        counts[code]++;
        if (code) {
            printf("%s: %s\n", shmserve_code_name(code), error.text);
            continue;
        }
        again += answer->attempts > 1;
        CHECK(((const float *)answer->outputs[0].data)[7] == (float)n + add);
    }
    for (int i = 0; i < 17; i++)
        if (counts[i]) printf("%s=%d\n", shmserve_code_name((shmserve_code)i), counts[i]);
    printf("again=%d\n", again);
    Floats f;
    floats_request(&f, in, 4096, out);
    f.request.timeout_ns = 60000 * MS;
    CHECK(!shmserve_infer(lane, &f.request, NULL, &error));
    shmserve_lane_close(lane);
}

/* What any call may return while executors and coordinators die. */
static bool may_be(shmserve_code code) {
    return code == SHMSERVE_OK || code == SHMSERVE_ABORTED || code == SHMSERVE_UNAVAILABLE || code == SHMSERVE_CANCELLED ||
           code == SHMSERVE_DEADLINE_EXCEEDED || code == SHMSERVE_RESOURCE_EXHAUSTED;
}

static unsigned next_random(unsigned *state) { return *state = *state * 1664525u + 1013904223u, *state >> 16; }

/* Take what has come, in one of the ways to wait. Each answer must be of the request that its `user` is. */
static const char *take_some(shmserve_lane *lane, unsigned *state, long *answered) {
    const shmserve_answer *answer = NULL;
    unsigned way = next_random(state) % 3;
    struct pollfd one = {.fd = shmserve_lane_fd(lane), .events = POLLIN};
    int wait = shmserve_lane_poll_ms(lane);
    if (way == 0) poll(&one, 1, wait < 0 || wait > 20 ? 20 : wait);
    do {
        if (shmserve_take(lane, way == 1 ? 5 * MS : 0, &answer, NULL)) return "take failed";
        if (!answer) break;
        if (!may_be(answer->code)) return answer->text;
        Floats *f = answer->user;
        if (!answer->code) {
            const float *result = answer->outputs[0].data;
            int64_t last = f->shape[0] - 1;
            if (answer->outputs[0].shape[0] != last + 1 || result[0] != f->value + 1 || result[last] != f->value + 8) return "wrong";
        }
        f->request.user = NULL; /* free again */
        ++*answered;
    } while (answer);
    return NULL;
}

static atomic_long all_answered, all_ready;

/* Keep a lane busy with up to eight requests of many kinds, also after the end until there were some answers: how many
 * come while servers die depends on the machine. */
static void *busy_thread(void *argument) {
    unsigned state = *(unsigned *)argument;
    long answered = 0;
    shmserve_lane *lane;
    shmserve_error mine;
    if (shmserve_lane_open(client, "pair", "", 30000 * MS, &lane, &mine)) return "no lane";
    Floats requests[8] = {0};
    float *memory[8], other[8][2000];
    for (int i = 0; i < 8; i++)
        if (!(memory[i] = shmserve_alloc(client, 40000, &mine))) return "no memory";
    atomic_fetch_add(&all_ready, 1);
    while (!atomic_load(&over) || answered < 50) {
        unsigned slot = next_random(&state) % 8, kind = next_random(&state);
        Floats *f = &requests[slot];
        if (!f->request.user) {
            size_t count = kind & 1 ? 2000 : 5;
            float *in = kind & 2 ? memory[slot] + 4096 : other[slot];
            f->value = (float)(next_random(&state) % 1000);
            in[0] = f->value, in[count - 1] = f->value + 7;
            floats_request(f, in, count, count > 5 || kind & 4 ? memory[slot] : NULL);
            f->request.user = f;
            f->request.timeout_ns = kind % 16 == 0 ? MS / 10 : 20000 * MS;
            uint64_t ticket;
            shmserve_code code = shmserve_submit(lane, &f->request, &ticket, &mine);
            if (code == SHMSERVE_FAILED_PRECONDITION && kind & 2) /* the input's buffer, too, may still be written to */
                code = shmserve_renew(client, memory[slot], &mine), f->request.user = NULL;
            else if (code) f->request.user = NULL;
            else if (kind % 32 == 9) shmserve_cancel(lane, ticket, NULL);
            if (!may_be(code)) return mine.text[0] ? "submit failed" : "?";
        }
        const char *problem = take_some(lane, &state, &answered);
        if (problem) return (void *)(uintptr_t)problem;
    }
    shmserve_lane_close(lane);
    for (int i = 0; i < 8; i++) shmserve_free(client, memory[i]);
    atomic_fetch_add(&all_answered, answered);
    return NULL;
}

static void busy_threads(void) {
    enum { THREADS = 4 };
    pthread_t started[THREADS];
    unsigned seeds[THREADS];
    for (unsigned i = 0; i < THREADS; i++) {
        seeds[i] = i + 1;
        CHECK(!pthread_create(&started[i], NULL, busy_thread, &seeds[i]));
    }
    while (atomic_load(&all_ready) < THREADS) usleep(1000);
    puts("begun");
    getchar(); /* until the standard input ends */
    atomic_store(&over, true);
    for (int i = 0; i < THREADS; i++) {
        void *problem;
        CHECK(!pthread_join(started[i], &problem));
        if (problem) fprintf(stderr, "thread %d: %s\n", i, (const char *)problem), exit(1);
    }
    printf("answered=%ld\n", atomic_load(&all_answered));
}

/* Send a command, of which the executor may die; then a harmless one. */
static void obey(const char *model, const char *text, const char *in_pool) {
    shmserve_lane *lane = open_lane(model);
    float *out = buffer(1024);
    Command c;
    command_request(&c, text, "OUT");
    c.output.data = *in_pool == 'p' ? out : NULL, c.output.nbytes = *in_pool == 'p' ? 4096 : 0;
    const shmserve_answer *answer;
    shmserve_code code = shmserve_infer(lane, &c.request, &answer, &error);
    printf("%s %u %s\n", shmserve_code_name(code), answer ? answer->attempts : 0, code ? error.text : "");
    shmserve_error renewed;
    bool stained = code == SHMSERVE_ABORTED && *in_pool == 'p';
    if (stained) { /* somewhere in the buffer: refused; at its start: renewed */
        command_request(&c, "ok:1", "OUT");
        c.output.data = out + 8, c.output.nbytes = 4;
        CHECK(shmserve_infer(lane, &c.request, NULL, &renewed) == SHMSERVE_FAILED_PRECONDITION);
    }
    for (int64_t until = now_ns() + 60000 * MS;;) { /* the executor needs a while to start */
        command_request(&c, "ok:1", "OUT");
        c.output.data = out, c.output.nbytes = 4096;
        code = shmserve_infer(lane, &c.request, NULL, &error);
        if (!code || now_ns() > until) break;
        CHECK(code == SHMSERVE_UNAVAILABLE || code == SHMSERVE_RESOURCE_EXHAUSTED);
        usleep(100000);
    }
    CHECK(!code && out[0] > 0);
    shmserve_lane_close(lane);
}

/* What a peer that breaks the protocol is answered with; no check but that the program lives. */
static void peer(const char *path, int64_t limit_ns) {
    shmserve_options options = {.path = path, .timeout_ns = limit_ns, .reconnect_ns = 200 * MS, .look_us = -1};
    shmserve_code code = shmserve_connect(&options, &client, &error);
    printf("connect %s\n", shmserve_code_name(code));
    if (code) return;
    shmserve_model *model = NULL;
    code = shmserve_describe(client, "m", "", limit_ns, &model, &error);
    printf("describe %s", shmserve_code_name(code));
    if (!code) printf(" %s %s", model->version, model->input_count ? model->inputs[0].name : "-");
    void *memory = shmserve_alloc(client, 100, &error);
    printf("\nalloc %s\n", shmserve_code_name(memory ? SHMSERVE_OK : error.code));
    shmserve_lane *lane;
    code = shmserve_lane_open(client, "m", "", limit_ns, &lane, &error);
    printf("lane %s\n", shmserve_code_name(code));
    if (!code) {
        float in[4] = {1, 2, 3, 4};
        Floats f;
        floats_request(&f, in, 4, memory);
        f.request.timeout_ns = limit_ns;
        const shmserve_answer *answer;
        code = shmserve_infer(lane, &f.request, &answer, &error);
        printf("infer %s", shmserve_code_name(code));
        if (answer && answer->output_count) printf(" %zu", answer->outputs[0].nbytes);
        printf("\n");
    }
    shmserve_lane_close(lane);
    shmserve_model_free(model);
    shmserve_close(client);
}

/* The code is that of the error, also where the error is not asked for, and where the call was willing to wait longer. */
static void peer_codes(const char *path) {
    shmserve_options options = {.path = path, .look_us = -1, .reconnect_ns = 60000 * MS};
    CHECK(!shmserve_connect(&options, &client, &error));
    shmserve_lane *lane;
    error.code = SHMSERVE_OK;
    shmserve_code code = shmserve_lane_open(client, "full", "", 200 * MS, &lane, &error);
    printf("lane %s %s\n", shmserve_code_name(code), shmserve_code_name(error.code));
    shmserve_close(client);
}

static void peer_memory(const char *path) {
    static float in[4096];
    shmserve_options options = {.path = path, .look_us = -1};
    CHECK(!shmserve_connect(&options, &client, &error));
    shmserve_lane *lane = open_lane("m");
    Floats f;
    floats_request(&f, in, 4096, NULL);
    f.request.timeout_ns = 200 * MS;
    for (int i = 0; i < 2; i++) {
        shmserve_code code = shmserve_infer(lane, &f.request, NULL, i ? NULL : &error);
        printf("infer %s\n", shmserve_code_name(code));
    }
    f.input.nbytes = SIZE_MAX - 8000;
    CHECK(shmserve_infer(lane, &f.request, NULL, &error) == SHMSERVE_INVALID_ARGUMENT);
    shmserve_lane_close(lane);
    shmserve_close(client);
}

/* A request that no lane takes is cancelled. */
static void peer_cancelled(const char *path) {
    shmserve_options options = {.path = path, .look_us = -1};
    CHECK(!shmserve_connect(&options, &client, &error));
    shmserve_lane *lane = open_lane("m");
    pthread_t thread;
    float in[4] = {1, 2, 3, 4};
    Floats f;
    floats_request(&f, in, 4, NULL);
    f.request.timeout_ns = 60000 * MS;
    CHECK(!pthread_create(&thread, NULL, cancel_soon, lane));
    printf("infer %s\n", shmserve_code_name(shmserve_infer(lane, &f.request, NULL, &error)));
    atomic_store(&over, true);
    pthread_join(thread, NULL);
    shmserve_lane_close(lane);
    shmserve_close(client);
}

/* A registration that is not answered, and a buffer that is freed when the server has hung up. */
static void peer_regions(const char *path) {
    static float in[4096];
    shmserve_options options = {.path = path, .look_us = -1};
    CHECK(!shmserve_connect(&options, &client, &error));
    shmserve_lane *lane = open_lane("m");
    Floats f;
    floats_request(&f, in, 4096, NULL);
    f.request.timeout_ns = 1000 * MS;
    printf("first %s\n", shmserve_code_name(shmserve_infer(lane, &f.request, NULL, &error)));
    getchar();
    printf("second %s\n", shmserve_alloc(client, 4096, &error) ? "OK" : error.text);
    getchar();
    shmserve_lane_close(lane);
    shmserve_close(client);
}

/* A server that lacks questions takes the place of another, twice. */
static void peer_older(const char *path) {
    shmserve_options options = {.path = path, .look_us = -1};
    CHECK(!shmserve_connect(&options, &client, &error));
    shmserve_lane *lane = NULL;
    shmserve_model *model = NULL;
    puts("connected"), getchar();
    printf("describe %s\n", shmserve_code_name(shmserve_describe(client, "m", "", 0, &model, &error)));
    getchar();
    printf("lane %s\n", shmserve_code_name(shmserve_lane_open(client, "m", "", 0, &lane, &error)));
    shmserve_close(client);
}

/* Use a parent's client and lane in its child. Each function fails there, and closing closes nothing of the parent's. */
static void use_in_child(shmserve_lane *lane, shmserve_lane *busy, uint64_t ticket, float *memory) {
    Floats f;
    floats_request(&f, memory, 4, memory);
    const shmserve_answer *answer = NULL;
    shmserve_lane *other = NULL;
    shmserve_model *model = NULL;
    error.text[0] = 0;
    CHECK(!shmserve_alloc(client, 4096, &error) && error.code == SHMSERVE_FAILED_PRECONDITION && strstr(error.text, "fork"));
    shmserve_code codes[] = {
        shmserve_renew(client, memory, &error), shmserve_describe(client, "m", "", 0, &model, &error),
        shmserve_lane_open(client, "m", "", 0, &other, &error), shmserve_infer(lane, &f.request, &answer, &error),
        shmserve_submit(lane, &f.request, NULL, &error), shmserve_take(busy, 0, &answer, &error),
        shmserve_cancel(busy, ticket, &error), shmserve_credit(busy, ticket, 1, &error),
    };
    for (size_t i = 0; i < sizeof codes / sizeof *codes; i++) CHECK(codes[i] == SHMSERVE_FAILED_PRECONDITION);
    CHECK(shmserve_lane_fd(busy) == -1);
    shmserve_free(client, memory);
    shmserve_lane_close(lane), shmserve_lane_close(busy);
    shmserve_close(client);
}

static void peer_fork(const char *path) {
    shmserve_options options = {.path = path, .look_us = -1};
    CHECK(!shmserve_connect(&options, &client, &error));
    shmserve_lane *lane = open_lane("m"), *busy = open_lane("m");
    float *memory = buffer(4);
    Floats f;
    uint64_t ticket;
    CHECK(!shmserve_submit(busy, floats_request(&f, memory, 4, NULL), &ticket, &error));
    struct pollfd answered = {.fd = shmserve_lane_fd(busy), .events = POLLIN};
    CHECK(poll(&answered, 1, -1) == 1);
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        use_in_child(lane, busy, ticket, memory);
        _exit(0);
    }
    int status;
    CHECK(waitpid(child, &status, 0) == child && !status);
    puts("child ended");
    getchar();
    CHECK(poll(&answered, 1, 0) == 1 && next_answer(busy)->ticket == ticket);
    shmserve_model *model = NULL;
    CHECK(!shmserve_describe(client, "m", "", 0, &model, &error));
    CHECK(!shmserve_infer(lane, &f.request, NULL, &error));
    shmserve_model_free(model);
    shmserve_lane_close(lane), shmserve_lane_close(busy);
    shmserve_close(client);
}

static void describe(const char *name) {
    shmserve_model *model = NULL;
    for (int round = 0; round < 2; round++) {
        shmserve_model *before = model;
        shmserve_code code = shmserve_describe(client, name, "", 0, &model, &error);
        if (code) {
            printf("%s %s\n", shmserve_code_name(code), error.text);
            return;
        }
        CHECK(!before || before == model);
    }
    printf("%s %s %s\n", model->name, model->version, model->decoupled ? "decoupled" : "single");
    for (int side = 0; side < 2; side++)
        for (size_t i = 0; i < (side ? model->output_count : model->input_count); i++) {
            const shmserve_spec *spec = &(side ? model->outputs : model->inputs)[i];
            printf("%s %s", spec->name, shmserve_datatype_name(spec->datatype));
            for (size_t k = 0; k < spec->rank; k++) printf(" %lld", (long long)spec->shape[k]);
            printf("\n");
        }
    shmserve_model_free(model);
}

/* ------------------------------------------------------------------------------------------ allocations, timing */

#ifdef COUNT_ALLOCATIONS /* glibc's own allocator under another name */
extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
static _Atomic long allocations;
static void *counted(void *memory) {
    allocations++;
    return memory;
}
void *malloc(size_t size) { return counted(__libc_malloc(size)); }
void *calloc(size_t count, size_t size) { return counted(__libc_calloc(count, size)); }
void *realloc(void *old, size_t size) { return counted(__libc_realloc(old, size)); }

static void warm(void) {
    static float elsewhere[3000];
    shmserve_lane *lane = open_lane("echo"), *teller = open_lane("teller"), *obeying = open_lane("misbehaving");
    shmserve_lane_fd(lane);
    float *in = buffer(3000), *out = buffer(3000);
    shmserve_model *model = NULL;
    long before = 0;
    for (int round = 0; round < 20; round++) {
        if (round == 2) before = allocations;
        Floats f;
        Command c;
        const shmserve_answer *answer;
        CHECK(!shmserve_infer(lane, floats_request(&f, in, 3000, out), NULL, &error));
        CHECK(!shmserve_infer(lane, floats_request(&f, elsewhere, 3000, out), NULL, &error));
        CHECK(!shmserve_infer(lane, floats_request(&f, elsewhere, 3, NULL), NULL, &error));
        CHECK(!shmserve_submit(lane, floats_request(&f, in, 3000, out), NULL, &error));
        next_answer(lane);
        f.input.name = "X";
        CHECK(shmserve_infer(lane, &f.request, NULL, &error) == SHMSERVE_INVALID_ARGUMENT);
        command_request(&c, "count:3", "N")->credit = 3;
        CHECK(!shmserve_submit(teller, &c.request, NULL, &error));
        do answer = next_answer(teller);
        while (!answer->final);
        command_request(&c, "sleep:0.02", "OUT")->timeout_ns = 5 * MS;
        shmserve_code code = shmserve_infer(obeying, &c.request, NULL, &error);
        CHECK(code == SHMSERVE_OK || code == SHMSERVE_DEADLINE_EXCEEDED);
        shmserve_free(client, shmserve_alloc(client, 20000, &error));
        shmserve_describe(client, "echo", "", 0, &model, &error);
    }
    CHECK(allocations == before);
    shmserve_model_free(model);
    shmserve_lane_close(lane), shmserve_lane_close(teller), shmserve_lane_close(obeying);
}
#endif

static int by_value(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Print the median time of requests with this number of bytes. */
static void timing(const char *bytes, const char *requests) {
    size_t count = strtoull(bytes, NULL, 10) / 4, rounds = strtoull(requests, NULL, 10);
    float *in = buffer(count), *out = buffer(count);
    int64_t *took = calloc(rounds, sizeof *took);
    shmserve_lane *lane = open_lane("echo");
    CHECK(took && rounds);
    for (size_t n = 0; n < rounds; n++) {
        Floats f;
        int64_t began = now_ns();
        CHECK(!shmserve_infer(lane, floats_request(&f, in, count, out), NULL, &error));
        took[n] = now_ns() - began;
    }
    qsort(took, rounds, sizeof *took, by_value);
    printf("%zu bytes: p50 %.1f us, p99 %.1f us\n", 4 * count, (double)took[rounds / 2] / 1e3, (double)took[rounds * 99 / 100] / 1e3);
    free(took);
    shmserve_lane_close(lane);
}

static int open_descriptors(void) {
    int count = 0;
    for (int fd = 0; fd < 1024; fd++) count += fcntl(fd, F_GETFD) >= 0;
    return count;
}

int main(int argc, char **argv) {
    int descriptors = open_descriptors();
    setvbuf(stdout, NULL, _IONBF, 0);
    if (argc < 3) return fprintf(stderr, "usage: checks NAME CLIENT_SOCKET [ARGUMENT ...]\n"), 2;
    const char *name = argv[1], *first = argc > 3 ? argv[3] : "", *second = argc > 4 ? argv[4] : "";
    if (!strncmp(name, "peer", 4)) {
        if (!strcmp(name, "peer")) peer(argv[2], *first ? atoll(first) * MS : 60000 * MS);
        else if (!strcmp(name, "peer_codes")) peer_codes(argv[2]);
        else if (!strcmp(name, "peer_memory")) peer_memory(argv[2]);
        else if (!strcmp(name, "peer_regions")) peer_regions(argv[2]);
        else if (!strcmp(name, "peer_older")) peer_older(argv[2]);
        else if (!strcmp(name, "peer_fork")) peer_fork(argv[2]);
        else peer_cancelled(argv[2]);
        CHECK(open_descriptors() == descriptors);
        return 0;
    }
    shmserve_options options = {.path = *argv[2] ? argv[2] : NULL, .reconnect_ns = 120000 * MS};
    CHECK(!shmserve_connect(&options, &client, &error));
    if (!strcmp(name, "datatypes")) datatypes();
    else if (!strcmp(name, "full_sockets")) full_sockets();
    else if (!strcmp(name, "refusals")) refusals();
    else if (!strcmp(name, "pool")) pool();
    else if (!strcmp(name, "streams")) streams();
    else if (!strcmp(name, "deadlines")) deadlines();
    else if (!strcmp(name, "poll_loop")) poll_loop();
    else if (!strcmp(name, "threads")) threads();
    else if (!strcmp(name, "busy_threads")) busy_threads();
    else if (!strcmp(name, "steady")) steady(first);
    else if (!strcmp(name, "obey")) obey(first, second, argc > 5 ? argv[5] : "message");
    else if (!strcmp(name, "describe")) describe(first);
    else if (!strcmp(name, "timing")) timing(first, second);
#ifdef COUNT_ALLOCATIONS
    else if (!strcmp(name, "warm")) warm();
#endif
    else return fprintf(stderr, "no check '%s'\n", name), 2;
    shmserve_close(client);
    CHECK(open_descriptors() == descriptors);
    return 0;
}
