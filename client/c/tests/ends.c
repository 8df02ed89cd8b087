/* Checks of the ends of lanes and connections, where this program is the other end too: nothing depends on timing. */
#include "../shmserve.c"

#include <sys/wait.h>

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
    client.control = -1, client.max_bytes = 1 << 30, client.any_owner = true;
    snprintf(client.path, sizeof client.path, "/nowhere");
    pthread_mutex_init(&client.turn, NULL), pthread_mutex_init(&client.pool, NULL);
    pthread_cond_init(&client.turn_over, NULL);
    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends));
    lane = new_pages(sizeof *lane, NULL);
    CHECK(lane);
    lane->client = &client, lane->fd = ends[0], lane->epoll = -1, lane->opened.timeout_ns = 60 * SECOND;
    for (size_t i = 0; i < UNDER_WAY; i++) lane->calls[i].parts = &lane->parts[i];
    pthread_mutex_init(&lane->guard, NULL);
    other = ends[1];
    return 0;
}

static int send_answer(uint64_t number, bool final) {
    uint8_t bytes[64];
    Writer w = writer(bytes, sizeof bytes);
    put_array(&w, 9), put_text(&w, "LaneAnswer"), put_uint(&w, number), put_array(&w, 0), put_uint(&w, 200);
    put_text(&w, ""), put_text(&w, ""), put_tag(&w, 0x80, 0, 0), put_array(&w, 0), put_tag(&w, final ? 0xc3 : 0xc2, 0, 0);
    CHECK(send(other, bytes, written(&w), 0) == (ssize_t)written(&w));
    return 0;
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

/* Credit for which the socket has no room is sent later. */
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
    uint64_t answers = 0;
    for (int round = 0; round < 2; round++) { /* the executor reads all; what had no room comes now */
        for (ssize_t got; (got = recv(other, packet, sizeof packet, MSG_DONTWAIT)) > 0;) {
            Reader r = {packet, packet + got, false};
            if (take_name(&r, "LaneCredit") == 2 && take_kind(&r, UNSIGNED) == ticket) answers += take_kind(&r, UNSIGNED);
        }
        CHECK(!shmserve_take(lane, 0, &answer, &error) && !answer);
    }
    CHECK(answers == 2);
    shmserve_lane_close(lane);
    close(other);
    return 0;
}

/* A lane's descriptor says nothing of a socket that was closed, also if a child process still has it. */
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
    close(ends[0]), close(other);
    CHECK(poll(&one_fd, 1, -1) == 1);
    const shmserve_answer *answer;
    CHECK(!shmserve_take(lane, 0, &answer, &error) && !answer && lane->fd < 0);
    CHECK(poll(&one_fd, 1, 0) == 0);
    close(ends[1]);
    int status;
    CHECK(waitpid(child, &status, 0) == child && !status);
    shmserve_lane_close(lane);
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
    CHECK(ask(&client, &w, -1, "Ok", now_ns() + MS, 60 * SECOND, &r, &items, &fd, &error) == SHMSERVE_UNAVAILABLE);
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

int main(int argc, char **argv) {
    const char *name = argc == 2 ? argv[1] : "";
    if (!strcmp(name, "answers")) return answers_before_the_end();
    if (!strcmp(name, "credit")) return credit_and_a_full_socket();
    if (!strcmp(name, "fork")) return closed_in_a_parent();
    if (!strcmp(name, "patience")) return patience();
    if (!strcmp(name, "time")) return a_short_time();
    return fprintf(stderr, "usage: ends NAME\n"), 2;
}
