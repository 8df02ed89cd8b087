/* A loop over frames, each with a budget of milliseconds: a frame whose answer comes later is given up, and the next
 * one is on time. Input and output lie in shared memory, and nothing is copied on the way to the model.
 *
 *     frames FRAMES BUDGET_MS [MODEL INPUT OUTPUT]
 */
#define _POSIX_C_SOURCE 200809L
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "shmserve.h"

#define PIXELS (640 * 480)
#define MS INT64_C(1000000)

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 * MS + now.tv_nsec;
}

/* Stands for a camera, which writes to shared memory. */
static void read_frame(float *frame, int number) {
    for (int i = 0; i < PIXELS; i++) frame[i] = (float)(number + i % 640);
}

static void sleep_until(int64_t at) {
    struct timespec until = {at / (1000 * MS), at % (1000 * MS)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL)) continue;
}

int main(int argc, char **argv) {
    if (argc != 3 && argc != 6) return fprintf(stderr, "usage: frames FRAMES BUDGET_MS [MODEL INPUT OUTPUT]\n"), 2;
    int frames = atoi(argv[1]), done = 0, late = 0;
    int64_t budget_ns = atoi(argv[2]) * MS, shape[] = {PIXELS};
    const char *model = argc == 6 ? argv[3] : "identity";
    shmserve_client *client = NULL;
    shmserve_lane *lane = NULL;
    shmserve_error error;
    if (shmserve_connect(NULL, &client, &error) || shmserve_lane_open(client, model, "", 0, &lane, &error))
        return fprintf(stderr, "%s\n", error.text), 1;
    /* One buffer for each: if a frame is given up, the model may still write to `result`, so the next request with
     * this output gives the buffer new memory at the same address. */
    float *frame = shmserve_alloc(client, PIXELS * sizeof *frame, &error);
    float *result = frame ? shmserve_alloc(client, PIXELS * sizeof *result, &error) : NULL;
    if (!result) return fprintf(stderr, "%s\n", error.text), 1;
    shmserve_tensor input = {argc == 6 ? argv[4] : "INPUT0", SHMSERVE_FP32, 1, shape, frame, PIXELS * sizeof *frame};
    shmserve_output output = {argc == 6 ? argv[5] : "OUTPUT0", result, PIXELS * sizeof *result};
    shmserve_request request = {.inputs = &input, .input_count = 1, .outputs = &output, .output_count = 1};
    int64_t start = now_ns();
    for (int number = 0; number < frames; number++) {
        read_frame(frame, number);
        request.deadline_ns = start + (number + 1) * budget_ns;
        const shmserve_answer *answer;
        shmserve_code code = shmserve_infer(lane, &request, &answer, &error);
        if (code == SHMSERVE_OK) done++; /* `result` holds the answer */
        else if (code == SHMSERVE_DEADLINE_EXCEEDED) late++;
        else return fprintf(stderr, "frame %d: %s: %s\n", number, shmserve_code_name(code), error.text), 1;
        sleep_until(request.deadline_ns);
    }
    printf("done=%d late=%d\n", done, late);
    shmserve_lane_close(lane);
    shmserve_free(client, frame), shmserve_free(client, result);
    shmserve_close(client);
    return 0;
}
