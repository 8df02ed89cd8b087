/* Checks of the ends of lanes and connections, where this program is the other end too: nothing depends on timing. */
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>

static unsigned interrupted;

/* As a kernel that undoes what it has allocated where a signal comes: here in every other call, and in all long ones. */
static int interrupted_fallocate(int fd, off_t at, off_t size) {
    if (++interrupted > 10000) return ENOSPC;
    return interrupted % 2 || size > 16 << 20 ? EINTR : posix_fallocate(fd, at, size);
}
#define posix_fallocate interrupted_fallocate

static unsigned refused; /* packets for which the kernel had no memory; 0: it has some */

static ssize_t send_or_refuse(int sock, const void *packet, size_t size, int flags) {
    if (!refused || ++refused > 100000) return send(sock, packet, size, flags);
    return errno = ENOBUFS, -1;
}
#define send send_or_refuse
#include "../shmserve.c"

#define CHECK(condition) \
    if (!(condition)) return fprintf(stderr, "line %d: %s\n", __LINE__, #condition), 1

static shmserve_client client;
static shmserve_lane *lane;
static int other; /* the executor's end */
static shmserve_error error;
static const int64_t shape[] = {1};
static const float one = 1;
static const shmserve_tensor input = {"IN", SHMSERVE_FP32, 1, shape, &one, sizeof one};

/* Make a lane by hand, of a client without a server. */
static int begin(void) {
    int ends[2];
    memset(&client, 0, sizeof client);
    client.owner = getpid(), client.control = -1, client.max_bytes = 1 << 30, client.any_owner = true;
    snprintf(client.path, sizeof client.path, "/nowhere");
    pthread_mutex_init(&client.turn, NULL), pthread_mutex_init(&client.pool, NULL);
    pthread_cond_init(&client.turn_over, NULL);
    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends));
    lane = new_pages(sizeof *lane, NULL);
    CHECK(lane);
    lane->client = &client, lane->fd = ends[0], lane->epoll = -1, lane->opened.timeout_ns = 60 * SECOND;
    pthread_mutex_init(&lane->guard, NULL);
    other = ends[1];
    return 0;
}

static int send_status(uint64_t number, bool final, unsigned status, const char *text, bool moved) {
    uint8_t bytes[128];
    Writer w = writer(bytes, sizeof bytes);
    put_array(&w, 10), put_text(&w, "LaneAnswer"), put_uint(&w, number), put_array(&w, 0), put_uint(&w, status);
    put_text(&w, ""), put_text(&w, text), put_tag(&w, 0x80, 0, 0), put_array(&w, 0);
    put_tag(&w, final ? 0xc3 : 0xc2, 0, 0), put_tag(&w, moved ? 0xc3 : 0xc2, 0, 0);
    CHECK(send(other, bytes, written(&w), 0) == (ssize_t)written(&w));
    return 0;
}

static int send_answer(uint64_t number, bool final) { return send_status(number, final, 200, "", false); }

/* Read what the executor has been sent, and return how many requests that are. */
static int read_requests(void) {
    static uint8_t packet[MAX_PACKET];
    int requests = 0;
    for (ssize_t got; (got = recv(other, packet, sizeof packet, MSG_DONTWAIT)) > 0;) {
        Reader r = {packet, packet + got, false};
        requests += take_name(&r, "LaneRequest") != SIZE_MAX;
    }
    return requests;
}

/* Add memory to the pool, which no server knows. */
static uint8_t *add_block(const char *name, size_t size) {
    Block *block = &client.blocks[client.order_count];
    *block = (Block){.size = size, .used = true, .fd = make_memory(name, size)};
    snprintf(block->name, sizeof block->name, "%s", name);
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, block->fd, 0);
    if (memory == MAP_FAILED) return NULL;
    block->address = memory;
    client.total_bytes += size;
    list_block(&client, block);
    return memory;
}

static void free_blocks(void) {
    while (client.order_count) discard(&client, &client.blocks[client.order[0]]);
}

/* An executor that answers, and ends: its answers count, although the next request cannot be sent. */
static int answers_before_the_end(void) {
    if (begin()) return 1;
    shmserve_request request = {.inputs = &input, .input_count = 1};
    uint64_t tickets[3];
    const shmserve_answer *answer;
    for (int i = 0; i < 2; i++) CHECK(!shmserve_submit(lane, &request, &tickets[i], &error));
    if (send_answer(tickets[1], true)) return 1;
    close(other);
    CHECK(!shmserve_submit(lane, &request, &tickets[2], &error));
    CHECK(!shmserve_take(lane, -1, &answer, &error) && answer);
    CHECK(answer->ticket == tickets[1] && answer->code == SHMSERVE_OK);
    CHECK(!shmserve_take(lane, -1, &answer, &error) && answer);
    CHECK(answer->ticket == tickets[0] && answer->code == SHMSERVE_ABORTED);
    CHECK(!shmserve_take(lane, -1, &answer, &error) && answer);
    CHECK(answer->ticket == tickets[2] && answer->code == SHMSERVE_UNAVAILABLE); /* nobody has had it */
    shmserve_lane_close(lane);
    return 0;
}

/* Credit and cancellations for which the socket has no room are sent later. */
static int credit_and_a_full_socket(void) {
    if (begin()) return 1;
    static const uint8_t zeros[4000];
    const int64_t many[] = {sizeof zeros};
    shmserve_tensor large[16];
    for (int i = 0; i < 16; i++) large[i] = (shmserve_tensor){"IN", SHMSERVE_UINT8, 1, many, zeros, sizeof zeros};
    shmserve_request stream = {.inputs = &input, .input_count = 1, .credit = 2};
    shmserve_request filling = {.inputs = large, .input_count = 16, .credit = 1};
    uint64_t ticket, number = 0;
    const shmserve_answer *answer;
    CHECK(!shmserve_submit(lane, &stream, &ticket, &error));
    while (count_calls(lane, UNSENT) == 0) CHECK(!shmserve_submit(lane, &filling, NULL, &error));
    uint8_t byte[1] = {0xc0};
    while (send(lane->fd, byte, 1, MSG_DONTWAIT) == 1) number++; /* not even a small packet has room */
    for (int i = 0; i < 2; i++) {
        if (send_answer(ticket, false)) return 1;
        CHECK(!shmserve_take(lane, -1, &answer, &error) && answer && answer->ticket == ticket);
    }
    CHECK(!shmserve_take(lane, 0, &answer, &error) && !answer);
    static uint8_t packet[MAX_PACKET];
    uint64_t answers = 0, cancelled = 0;
    for (int round = 0; round < 3; round++) { /* the executor reads all; what had no room comes now */
        for (ssize_t got; (got = recv(other, packet, sizeof packet, MSG_DONTWAIT)) > 0;) {
            Reader r = {packet, packet + got, false};
            if (take_name(&r, "LaneCredit") == 2 && take_kind(&r, UNSIGNED) == ticket) answers += take_kind(&r, UNSIGNED);
            if (take_name(&r, "LaneCancel") == 1 && take_kind(&r, UNSIGNED) == ticket) cancelled++;
        }
        CHECK(!shmserve_take(lane, 0, &answer, &error) && !answer);
        if (round) continue;
        while (send(lane->fd, byte, 1, MSG_DONTWAIT) == 1) continue; /* full again, when the stream's time is over */
        lane->calls[0].deadline = now_ns();
        CHECK(!shmserve_take(lane, -1, &answer, &error) && answer && answer->code == SHMSERVE_DEADLINE_EXCEEDED);
    }
    CHECK(answers == 2 && cancelled == 1);
    shmserve_lane_close(lane);
    close(other);
    return 0;
}

/* A lane that is closed has ended for the executor and for its descriptor, also if a child process still has both. */
static int closed_in_a_parent(void) {
    if (begin()) return 1;
    struct pollfd one_fd = {.fd = shmserve_lane_fd(lane), .events = POLLIN};
    int ends[2];
    char byte;
    CHECK(one_fd.fd >= 0 && !pipe(ends));
    pid_t child = fork();
    CHECK(child >= 0);
    if (!child) {
        close(ends[1]), close(other);
        _exit(read(ends[0], &byte, 1) != 0);
    }
    close(ends[0]), shutdown(other, SHUT_WR);
    CHECK(poll(&one_fd, 1, -1) == 1);
    const shmserve_answer *answer;
    CHECK(!shmserve_take(lane, 0, &answer, &error) && !answer && lane->fd < 0);
    CHECK(poll(&one_fd, 1, 0) == 0);
    CHECK(recv(other, &byte, 1, MSG_DONTWAIT) == 0);
    close(ends[1]);
    int status;
    CHECK(waitpid(child, &status, 0) == child && !status);
    shmserve_lane_close(lane), close(other);
    return 0;
}

/* Only a call that has waited long for the server keeps others from waiting. */
static int patience(void) {
    if (begin()) return 1;
    Reader r;
    size_t items;
    int fd;
    uint8_t bytes[8];
    Writer w = writer(bytes, sizeof bytes);
    client.reconnect_ns = client.patience_ns = 60 * SECOND;
    CHECK(ask(&client, &w, -1, "Ok", NEVER, 0, &r, &items, &fd, &error) == SHMSERVE_UNAVAILABLE);
    CHECK(ask(&client, &w, -1, "Ok", now_ns() + MS, 60 * SECOND, &r, &items, &fd, &error)); /* late on a busy machine */
    CHECK(client.patience_ns == 60 * SECOND);
    CHECK(ask(&client, &w, -1, "Ok", NEVER, MS, &r, &items, &fd, &error) == SHMSERVE_UNAVAILABLE && !client.patience_ns);
    shmserve_lane_close(lane), close(other);
    return 0;
}

/* A caller with little time for each call gets a lane all the same: the attempt has its own, longer time. */
static int a_short_time(void) {
    if (begin()) return 1;
    char folder[] = "/tmp/shmserve-ends-XXXXXX";
    CHECK(mkdtemp(folder));
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    snprintf(client.path, sizeof client.path, "%s/x", folder);
    memcpy(address.sun_path, client.path, sizeof client.path);
    int listener = socket(AF_UNIX, SOCK_SEQPACKET, 0); /* takes connections, and says nothing */
    bool listens = !bind(listener, (struct sockaddr *)&address, sizeof address) && !listen(listener, 5);
    shmserve_request request = {.inputs = &input, .input_count = 1};
    const shmserve_answer *answer;
    CHECK(!shmserve_submit(lane, &request, NULL, &error));
    lane->opened.rerun = true, client.reconnect_ns = 60 * SECOND;
    close(other);
    CHECK(!shmserve_take(lane, 0, &answer, &error) && !answer && lane->fd < 0);
    lane->retry_at = 0;
    int64_t began = now_ns();
    CHECK(!shmserve_take(lane, 1, &answer, &error) && !answer && now_ns() - began >= TRY_NS);
    shmserve_lane_close(lane), close(listener);
    CHECK(listens && !unlink(client.path) && !rmdir(folder));
    return 0;
}

static void *cancel_soon(void *ticket) {
    usleep(50000);
    return (void *)(uintptr_t)shmserve_cancel(lane, *(uint64_t *)ticket, NULL);
}

/* A request that waits for another lane, while this one still has a stream, is cancelled at once. */
static int cancelled_before_it_is_sent(void) {
    if (begin()) return 1;
    shmserve_request stream = {.inputs = &input, .input_count = 1, .credit = 2}, request = {.inputs = &input, .input_count = 1};
    uint64_t tickets[3];
    const shmserve_answer *answer;
    CHECK(!shmserve_submit(lane, &stream, &tickets[0], &error));
    for (int i = 1; i < 3; i++) CHECK(!shmserve_submit(lane, &request, &tickets[i], &error));
    for (int i = 1; i < 3; i++)
        if (send_status(tickets[i], true, 503, "", true)) return 1;
    for (int i = 1; i < 3; i++) CHECK(!shmserve_take(lane, 0, &answer, &error) && !answer);
    CHECK(lane->leaving && count_calls(lane, UNSENT) == 2 && shmserve_lane_poll_ms(lane) >= 0);
    CHECK(!shmserve_cancel(lane, tickets[1], &error) && !shmserve_lane_poll_ms(lane));
    if (send_answer(tickets[0], false)) return 1;
    CHECK(!shmserve_take(lane, -1, &answer, &error) && answer->ticket == tickets[1] && answer->code == SHMSERVE_CANCELLED);
    CHECK(!shmserve_take(lane, -1, &answer, &error) && answer->ticket == tickets[0] && !answer->final);
    pthread_t thread;
    CHECK(!pthread_create(&thread, NULL, cancel_soon, &tickets[2]));
    CHECK(!shmserve_take(lane, -1, &answer, &error) && answer);
    CHECK(answer->ticket == tickets[2] && answer->code == SHMSERVE_CANCELLED);
    CHECK(!pthread_join(thread, NULL));
    shmserve_lane_close(lane), close(other);
    return 0;
}

/* Requests that were given up leave room for others, which are sent as answers come. */
static int late_requests(void) {
    if (begin()) return 1;
    shmserve_request stream = {.inputs = &input, .input_count = 1, .credit = 1}, request = {.inputs = &input, .input_count = 1};
    shmserve_request hasty = {.inputs = &input, .input_count = 1, .timeout_ns = MS};
    uint64_t ticket, late[UNDER_WAY - 1], others[2];
    const shmserve_answer *answer;
    CHECK(!shmserve_submit(lane, &stream, &ticket, &error));
    for (int i = 0; i < UNDER_WAY - 1; i++) {
        CHECK(!shmserve_submit(lane, &hasty, &late[i], &error));
        CHECK(!shmserve_take(lane, -1, &answer, &error) && answer->code == SHMSERVE_DEADLINE_EXCEEDED);
    }
    for (int i = 0; i < 2; i++) CHECK(!shmserve_submit(lane, &request, &others[i], &error));
    CHECK(shmserve_under_way(lane) == 3 && read_requests() == UNDER_WAY);
    if (send_answer(late[3], true)) return 1;
    CHECK(!shmserve_take(lane, 0, &answer, &error) && !answer && read_requests() == 1);
    if (send_answer(others[0], true)) return 1;
    CHECK(!shmserve_take(lane, -1, &answer, &error) && answer->ticket == others[0] && !answer->code);
    CHECK(!shmserve_submit(lane, &request, &others[0], &error));
    CHECK(!shmserve_take(lane, 0, &answer, &error) && !answer && read_requests() == 1);
    if (send_answer(ticket, true)) return 1;
    CHECK(!shmserve_take(lane, -1, &answer, &error) && answer->ticket == ticket && answer->final);
    CHECK(!shmserve_take(lane, 0, &answer, &error) && !answer && read_requests() == 1);
    for (int i = 0; i < 2; i++) {
        if (send_answer(others[i], true)) return 1;
        CHECK(!shmserve_take(lane, -1, &answer, &error) && answer->ticket == others[i] && !answer->code);
    }
    shmserve_lane_close(lane), close(other);
    return 0;
}

/* An answer that came in time counts, also behind a late one, when the caller looks after the deadline. */
static int answers_behind_a_late_one(void) {
    if (begin()) return 1;
    shmserve_request request = {.inputs = &input, .input_count = 1}, hasty = request;
    hasty.timeout_ns = MS;
    uint64_t tickets[2];
    const shmserve_answer *answer;
    CHECK(!shmserve_submit(lane, &hasty, &tickets[0], &error));
    CHECK(!shmserve_take(lane, -1, &answer, &error) && answer->code == SHMSERVE_DEADLINE_EXCEEDED);
    CHECK(!shmserve_submit(lane, &request, &tickets[1], &error));
    for (int i = 0; i < 2; i++)
        if (send_answer(tickets[i], true)) return 1;
    lane->calls[1].deadline = now_ns();
    CHECK(!shmserve_take(lane, 0, &answer, &error) && answer && answer->ticket == tickets[1] && !answer->code);
    shmserve_lane_close(lane), close(other);
    return 0;
}

/* An executor that sends more late answers than it has credit for has lost the lane: no call waits for their end. */
static int late_answers_for_ever(void) {
    shmserve_request stream = {.inputs = &input, .input_count = 1, .credit = 2, .timeout_ns = MS};
    shmserve_request request = {.inputs = &input, .input_count = 1, .timeout_ns = SECOND};
    uint64_t ticket;
    const shmserve_answer *answer;
    for (int for_ever = 0; for_ever < 2; for_ever++) {
        if (begin()) return 1;
        CHECK(!shmserve_submit(lane, &stream, &ticket, &error));
        CHECK(!shmserve_take(lane, -1, &answer, &error) && answer->code == SHMSERVE_DEADLINE_EXCEEDED);
        for (int i = 0; i < 3 && !for_ever; i++) {
            CHECK(!shmserve_take(lane, 0, &answer, &error) && !answer && lane->fd >= 0);
            if (send_answer(ticket, false)) return 1;
        }
        pid_t child = for_ever ? fork() : 0;
        CHECK(child >= 0);
        if (for_ever && !child) {
            close(lane->fd), close(STDERR_FILENO);
            while (!send_answer(ticket, false)) continue;
            _exit(0);
        }
        close(other);
        CHECK(!shmserve_submit(lane, &request, NULL, &error));
        CHECK(!shmserve_take(lane, -1, &answer, &error) && answer && answer->code != SHMSERVE_DEADLINE_EXCEEDED);
        CHECK(lane->fd < 0);
        shmserve_lane_close(lane);
        if (child) CHECK(waitpid(child, NULL, 0) == child);
    }
    return 0;
}

/* A stream that gets more answers than it has given credit for is none. */
static int answers_without_credit(void) {
    if (begin()) return 1;
    shmserve_request stream = {.inputs = &input, .input_count = 1, .credit = 2, .hold_credit = true};
    uint64_t ticket;
    const shmserve_answer *answer;
    CHECK(!shmserve_submit(lane, &stream, &ticket, &error));
    for (int i = 0; i < 4; i++) {
        if (send_answer(ticket, false)) return 1;
        CHECK(!shmserve_take(lane, -1, &answer, &error) && answer);
        CHECK(answer->code == (i < 3 ? SHMSERVE_OK : SHMSERVE_PROTOCOL) && answer->final == (i == 3));
        if (!i) CHECK(!shmserve_credit(lane, ticket, 1, &error));
    }
    shmserve_lane_close(lane), close(other);
    return 0;
}

/* An executor that does not answer cancelled requests for long is left, when all others have been answered. */
static int stuck(void) {
    if (begin()) return 1;
    shmserve_request request = {.inputs = &input, .input_count = 1}, hasty = request;
    hasty.timeout_ns = MS;
    uint64_t tickets[2];
    const shmserve_answer *answer;
    CHECK(!shmserve_submit(lane, &request, &tickets[0], &error));
    for (int i = 0; i < UNDER_WAY - 1; i++) {
        CHECK(!shmserve_submit(lane, &hasty, NULL, &error));
        CHECK(!shmserve_take(lane, -1, &answer, &error) && answer->code == SHMSERVE_DEADLINE_EXCEEDED);
    }
    for (size_t i = 0; i < lane->call_count; i++) lane->calls[i].given_up_at -= 2 * LATE_NS;
    CHECK(!shmserve_submit(lane, &request, &tickets[1], &error) && lane->fd >= 0);
    if (send_answer(tickets[0], true)) return 1;
    CHECK(!shmserve_take(lane, -1, &answer, &error) && answer->ticket == tickets[0] && !answer->code);
    CHECK(!shmserve_submit(lane, &request, &tickets[0], &error));
    for (int i = 0; i < 2; i++) { /* no other executor is there */
        CHECK(!shmserve_take(lane, -1, &answer, &error) && answer && lane->fd < 0);
        CHECK(answer->code == SHMSERVE_UNAVAILABLE);
    }
    shmserve_lane_close(lane), close(other);
    return 0;
}

/* A buffer that could not be renewed is as before. */
static int renewed_in_vain(void) {
    if (begin()) return 1;
    float *memory = (float *)add_block("one", 1 << 16);
    CHECK(memory);
    shmserve_output output = {"OUT", memory, 4}, part = {"OUT", memory + 1, 4};
    shmserve_request request = {.inputs = &input, .input_count = 1, .outputs = &output, .output_count = 1, .timeout_ns = MS};
    uint64_t ticket;
    const shmserve_answer *answer;
    CHECK(shmserve_renew(&client, memory, &error) == SHMSERVE_UNAVAILABLE);
    CHECK(!shmserve_submit(lane, &request, &ticket, &error));
    CHECK(!shmserve_take(lane, -1, &answer, &error) && answer->code == SHMSERVE_DEADLINE_EXCEEDED);
    request.timeout_ns = 60 * SECOND;
    CHECK(shmserve_submit(lane, &request, NULL, &error) == SHMSERVE_UNAVAILABLE); /* to renew the buffer */
    request.outputs = &part;
    CHECK(shmserve_submit(lane, &request, NULL, &error) == SHMSERVE_FAILED_PRECONDITION);
    if (send_answer(ticket, true)) return 1;
    CHECK(!shmserve_submit(lane, &request, NULL, &error));
    CHECK(!client.unwanted_count); /* nothing has reached a server */
    shmserve_lane_close(lane), close(other);
    free_blocks();
    return 0;
}

/* Unused buffers are dropped only for one that then fits. */
static int unused_buffers(void) {
    if (begin()) return 1;
    for (int i = 0; i < 4; i++) CHECK(add_block("some", 1 << 20));
    for (int i = 0; i < 3; i++) shmserve_free(&client, client.blocks[i].address);
    client.max_bytes = 5 << 20;
    CHECK(!shmserve_alloc(&client, 6 << 20, &error) && error.code == SHMSERVE_RESOURCE_EXHAUSTED);
    CHECK(!shmserve_alloc(&client, 5 << 20, &error) && error.code == SHMSERVE_RESOURCE_EXHAUSTED); /* one is in use */
    CHECK(client.order_count == 4 && client.total_bytes == 4 << 20);
    CHECK(!shmserve_alloc(&client, 3 << 20, &error) && error.code == SHMSERVE_UNAVAILABLE);
    CHECK(client.order_count == 2 && client.total_bytes == 2 << 20 && client.unwanted_count == 2);
    shmserve_lane_close(lane), close(other);
    free_blocks();
    return 0;
}

static int registered;

/* Answer each question; regions that are not "known" are refused. */
static void *serve_control(void *sock) {
    uint8_t packet[1024], reply[64];
    for (ssize_t got; (got = recv(*(int *)sock, packet, sizeof packet, 0)) > 0;) {
        Writer w = writer(reply, sizeof reply);
        bool known = memmem(packet, (size_t)got, "known", 5);
        registered += known;
        put_array(&w, known ? 1 : 3), put_text(&w, known ? "Ok" : "Failed");
        if (!known) put_text(&w, "RESOURCE_EXHAUSTED"), put_text(&w, "too many");
        if (send(*(int *)sock, reply, written(&w), 0) < 0) break;
    }
    return NULL;
}

/* A server that has lost a request's memory gets that memory again, once. What a stream has of such failures is its own. */
static int lost_memory(void) {
    if (begin()) return 1;
    int ends[2];
    pthread_t thread;
    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends));
    client.control = ends[0];
    CHECK(!pthread_create(&thread, NULL, serve_control, &ends[1]));
    float *memory = add_block("refused", 1 << 16) ? (float *)add_block("known", 1 << 16) : NULL;
    CHECK(memory);
    shmserve_tensor there = {"IN", SHMSERVE_FP32, 1, shape, memory + 8, 4};
    shmserve_output output = {"OUT", memory, 4};
    shmserve_request request = {.inputs = &there, .input_count = 1, .outputs = &output, .output_count = 1};
    static const char unknown[] = "Unable to find shared memory region: 'known'";
    uint64_t ticket;
    const shmserve_answer *answer;
    for (int round = 0; round < 2; round++) {
        CHECK(!shmserve_submit(lane, &request, &ticket, &error) && read_requests() == 1);
        if (send_status(ticket, true, 404, unknown, false)) return 1;
        CHECK(!shmserve_take(lane, 0, &answer, &error) && !answer && read_requests() == 1);
        CHECK(registered == round + 1);
        if (round ? send_status(ticket, true, 404, unknown, false) : send_answer(ticket, true)) return 1;
        CHECK(!shmserve_take(lane, -1, &answer, &error) && answer->final && answer->attempts == 2);
        CHECK(answer->http_status == (round ? 404 : 200) && registered == round + 1);
    }
    request.credit = 1;
    CHECK(!shmserve_submit(lane, &request, &ticket, &error) && read_requests() == 1);
    if (send_status(ticket, false, 404, unknown, false)) return 1;
    CHECK(!shmserve_take(lane, -1, &answer, &error) && answer->http_status == 404 && !answer->final && !read_requests());
    shmserve_lane_close(lane), close(other);
    disconnect(&client);
    CHECK(!pthread_join(thread, NULL));
    close(ends[1]);
    free_blocks();
    return 0;
}

/* What has no meaning yet must be zero; a time limit that is negative has passed. */
static int arguments(void) {
    if (begin()) return 1;
    shmserve_client *none;
    shmserve_lane *no_lane;
    shmserve_options options = {.path = "/nowhere", .reserved = {[7] = 1}}, flags = {.path = "/nowhere", .reserved_flags = 1};
    CHECK(shmserve_connect(&options, &none, &error) == SHMSERVE_INVALID_ARGUMENT);
    CHECK(shmserve_connect(&flags, &none, &error) == SHMSERVE_INVALID_ARGUMENT);
    shmserve_request request = {.inputs = &input, .input_count = 1, .reserved = {[3] = 1}};
    CHECK(shmserve_submit(lane, &request, NULL, &error) == SHMSERVE_INVALID_ARGUMENT);
    request.reserved[3] = 0, request.timeout_ns = -1;
    CHECK(shmserve_submit(lane, &request, NULL, &error) == SHMSERVE_DEADLINE_EXCEEDED);
    CHECK(shmserve_lane_open(&client, "m", "", -1, &no_lane, &error) == SHMSERVE_DEADLINE_EXCEEDED && !no_lane);
    shmserve_lane_close(lane), close(other);
    return 0;
}

/* The server ends the lane, or the connection, where a text is not UTF-8: it is not sent. */
static int texts(void) {
    static const char *const BAD[] = {"\xff", "a\x80", "\xc3", "\xe2\x82", "\xf0\x9f\x98", "\xc0\xaf", "\xe0\x80\xaf",
                                      "\xf0\x80\x80\xaf", "\xed\xa0\x80", "\xf4\x90\x80\x80", "\xf8\x88\x80\x80\x80"};
    if (begin()) return 1;
    shmserve_tensor named = input;
    shmserve_request request = {.inputs = &named, .input_count = 1};
    shmserve_lane *none;
    shmserve_model *model = NULL;
    for (size_t i = 0; i < sizeof BAD / sizeof *BAD; i++) {
        named.name = BAD[i];
        CHECK(shmserve_submit(lane, &request, NULL, &error) == SHMSERVE_INVALID_ARGUMENT && strstr(error.text, "UTF-8"));
        CHECK(shmserve_lane_open(&client, BAD[i], "", 0, &none, &error) == SHMSERVE_INVALID_ARGUMENT && !none);
        CHECK(shmserve_describe(&client, "m", BAD[i], 0, &model, &error) == SHMSERVE_INVALID_ARGUMENT && !model);
    }
    CHECK(read_requests() == 0);
    named.name = "\x7f\xc2\x80\xdf\xbf\xe0\xa0\x80\xed\x9f\xbf\xee\x80\x80\xf0\x90\x80\x80\xf4\x8f\xbf\xbf";
    CHECK(!shmserve_submit(lane, &request, NULL, &error) && read_requests() == 1);
    shmserve_lane_close(lane), close(other);
    return 0;
}

/* Signals that keep coming do not keep memory from being allocated. */
static int signals(void) {
    size_t size = ((size_t)64 << 20) + 4096;
    int fd = make_memory("signals", size);
    struct stat about;
    CHECK(fd >= 0 && !fstat(fd, &about) && (size_t)about.st_size == size && (size_t)about.st_blocks * 512 == size);
    close(fd);
    return 0;
}

/* A kernel without memory for a packet is asked again later, although the socket has room. */
static int no_memory_to_send(void) {
    if (begin()) return 1;
    shmserve_request request = {.inputs = &input, .input_count = 1};
    uint64_t ticket;
    const shmserve_answer *answer;
    refused = 1;
    CHECK(!shmserve_submit(lane, &request, &ticket, &error));
    CHECK(refused < 100 && count_calls(lane, UNSENT) == 1);
    CHECK(send_packet(other, "x", 1, -1, now_ns() + 50 * MS) == TIMEOUT && refused < 1000);
    refused = 0;
    CHECK(!shmserve_take(lane, 0, &answer, &error) && !answer && read_requests() == 1);
    if (send_answer(ticket, true)) return 1;
    CHECK(!shmserve_take(lane, -1, &answer, &error) && answer && answer->code == SHMSERVE_OK);
    shmserve_lane_close(lane), close(other);
    return 0;
}

/* A process that has as many descriptors as it may: the server has broken nothing. */
static int no_descriptor_is_left(void) {
    if (begin()) return 1;
    int control[2];
    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, control));
    client.control = control[0], client.has_lanes = true;
    uint8_t bytes[64];
    Writer w = writer(bytes, sizeof bytes);
    put_array(&w, 5), put_text(&w, "LaneOpened"), put_text(&w, "1"), put_text(&w, "m-1-0");
    put_tag(&w, 0xc2, 0, 0), put_uint(&w, 1);
    CHECK(send_packet(control[1], bytes, written(&w), other, NEVER) == DONE);
    struct rlimit usual, none;
    CHECK(!getrlimit(RLIMIT_NOFILE, &usual));
    int next = dup(other);
    close(next);
    none = usual, none.rlim_cur = (rlim_t)next;
    CHECK(!setrlimit(RLIMIT_NOFILE, &none));
    shmserve_lane *second;
    bool no_buffer = !shmserve_alloc(&client, 1, &error) && strstr(error.text, strerror(EMFILE));
    shmserve_code code = shmserve_lane_open(&client, "m", "", 0, &second, &error);
    CHECK(!setrlimit(RLIMIT_NOFILE, &usual));
    CHECK(no_buffer && code == SHMSERVE_RESOURCE_EXHAUSTED && !second && strstr(error.text, "no descriptor"));
    shmserve_lane_close(lane), close(other), close(control[1]);
    return 0;
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        int (*check)(void);
    } ALL[] = {
        {"answers", answers_before_the_end}, {"credit", credit_and_a_full_socket}, {"fork", closed_in_a_parent},
        {"patience", patience}, {"time", a_short_time}, {"cancel", cancelled_before_it_is_sent}, {"late", late_requests},
        {"behind", answers_behind_a_late_one}, {"for_ever", late_answers_for_ever}, {"no_credit", answers_without_credit},
        {"stuck", stuck}, {"renew", renewed_in_vain}, {"unused", unused_buffers}, {"lost_memory", lost_memory},
        {"arguments", arguments}, {"signals", signals}, {"no_descriptor", no_descriptor_is_left},
        {"no_memory", no_memory_to_send}, {"texts", texts},
    };
    for (size_t i = 0; argc == 2 && i < sizeof ALL / sizeof *ALL; i++)
        if (!strcmp(argv[1], ALL[i].name)) return ALL[i].check();
    return fprintf(stderr, "usage: ends NAME\n"), 2;
}
