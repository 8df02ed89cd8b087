/* One thread, an event loop, and two lanes: requests to `identity`, four of them at a time, and a stream of
 * `repeat_int32`, whose model waits while two answers are unread.
 *
 *     poll_loop REQUESTS
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>

#include "shmserve.h"

#define AT_A_TIME 4

static shmserve_error error;

static void check(shmserve_code code) {
    if (!code) return;
    fprintf(stderr, "%s: %s\n", shmserve_code_name(code), error.text);
    exit(1);
}

/* Send the request with this number; its answer repeats the number as `user`. */
static void send_number(shmserve_lane *lane, intptr_t number) {
    float value = (float)number; /* small: it travels in the message */
    shmserve_tensor input = {"INPUT0", SHMSERVE_FP32, 1, (int64_t[]){1}, &value, sizeof value};
    shmserve_request request = {.inputs = &input, .input_count = 1, .user = (void *)number};
    check(shmserve_submit(lane, &request, NULL, &error));
}

static void send_stream(shmserve_lane *lane) {
    static const int32_t values[] = {10, 20, 30, 40, 50};
    static const uint32_t delays[] = {0, 1, 2, 1, 0}, wait = 0;
    shmserve_tensor inputs[] = {
        {"IN", SHMSERVE_INT32, 1, (int64_t[]){5}, values, sizeof values},
        {"DELAY", SHMSERVE_UINT32, 1, (int64_t[]){5}, delays, sizeof delays},
        {"WAIT", SHMSERVE_UINT32, 1, (int64_t[]){1}, &wait, sizeof wait},
    };
    shmserve_output output = {.name = "OUT"};
    shmserve_request request = {.inputs = inputs, .input_count = 3, .outputs = &output, .output_count = 1, .credit = 2};
    check(shmserve_submit(lane, &request, NULL, &error));
}

/* Take a lane's next answer, if there is one now. */
static const shmserve_answer *next_answer(shmserve_lane *lane) {
    const shmserve_answer *answer;
    check(shmserve_take(lane, 0, &answer, &error));
    if (answer && answer->code) {
        fprintf(stderr, "%s: %s\n", shmserve_code_name(answer->code), answer->text);
        exit(1);
    }
    return answer;
}

int main(int argc, char **argv) {
    if (argc != 2) return fprintf(stderr, "usage: poll_loop REQUESTS\n"), 2;
    shmserve_client *client;
    shmserve_lane *calls, *stream;
    check(shmserve_connect(NULL, &client, &error));
    check(shmserve_lane_open(client, "identity", "", 0, &calls, &error));
    check(shmserve_lane_open(client, "repeat_int32", "", 0, &stream, &error));
    int requests = atoi(argv[1]), sent = 0, right = 0, sum = 0;
    struct pollfd lanes[] = {{shmserve_lane_fd(calls), POLLIN, 0}, {shmserve_lane_fd(stream), POLLIN, 0}};
    send_stream(stream);
    while (sent < requests || shmserve_under_way(calls) || shmserve_under_way(stream)) {
        while (sent < requests && shmserve_under_way(calls) < AT_A_TIME) send_number(calls, sent++);
        /* the earlier of both times; -1 is never, and the largest as an unsigned number */
        unsigned first = (unsigned)shmserve_lane_poll_ms(calls), second = (unsigned)shmserve_lane_poll_ms(stream);
        poll(lanes, 2, (int)(first < second ? first : second));
        const shmserve_answer *answer;
        while ((answer = next_answer(calls)))
            right += *(const float *)answer->outputs[0].data == (float)(intptr_t)answer->user;
        while ((answer = next_answer(stream)))
            if (answer->output_count) sum += *(const int32_t *)answer->outputs[0].data;
    }
    printf("right=%d sum=%d\n", right, sum);
    shmserve_lane_close(calls), shmserve_lane_close(stream);
    shmserve_close(client);
    return 0;
}
