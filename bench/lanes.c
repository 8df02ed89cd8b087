/* Callers on libshmserve, each a thread with a lane and memory of its own, in closed loops. Prints times of calls and
 * the rate of all callers together.
 *
 *     lanes CLIENT_SOCKET MODEL INPUT OUTPUT BYTES CALLERS SECONDS
 */
#define _POSIX_C_SOURCE 200809L
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "../client/c/shmserve.h"

#define MOST_CALLERS 64
#define MOST_CALLS 1000000
#define WARM_UP 20

static shmserve_client *client;
static char **names;
static size_t nbytes;
static int64_t lasting_ns;

typedef struct {
    pthread_t thread;
    int64_t *took;
    size_t count;
} Caller;

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void check(bool right, const shmserve_error *error) {
    if (right) return;
    fprintf(stderr, "%s: %s\n", shmserve_code_name(error->code), error->text);
    exit(1);
}

static void *call(void *own) {
    Caller *caller = own;
    shmserve_error error;
    shmserve_lane *lane;
    check(!shmserve_lane_open(client, names[0], "", 0, &lane, &error), &error);
    float *in = shmserve_alloc(client, nbytes, &error);
    check(in, &error);
    float *out = shmserve_alloc(client, nbytes, &error);
    check(out, &error);
    for (size_t i = 0; i < nbytes / 4; i++) in[i] = 1;
    int64_t shape[] = {(int64_t)(nbytes / 4)};
    shmserve_tensor input = {names[1], SHMSERVE_FP32, 1, shape, in, nbytes};
    shmserve_output output = {names[2], out, nbytes};
    shmserve_request request = {.inputs = &input, .input_count = 1, .outputs = &output, .output_count = 1};
    for (int i = 0; i < WARM_UP; i++) check(!shmserve_infer(lane, &request, NULL, &error), &error);
    int64_t end = now_ns() + lasting_ns, before = now_ns();
    while (before < end && caller->count < MOST_CALLS) {
        check(!shmserve_infer(lane, &request, NULL, &error), &error);
        int64_t after = now_ns();
        caller->took[caller->count++] = after - before;
        before = after;
    }
    shmserve_lane_close(lane);
    return NULL;
}

static int by_value(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv) {
    static Caller callers[MOST_CALLERS];
    int number = argc == 8 ? atoi(argv[6]) : 0;
    if (number < 1 || number > MOST_CALLERS)
        return fprintf(stderr, "usage: lanes CLIENT_SOCKET MODEL INPUT OUTPUT BYTES CALLERS SECONDS\n"), 2;
    names = argv + 2, nbytes = strtoull(argv[5], NULL, 10), lasting_ns = (int64_t)(atof(argv[7]) * 1e9);
    shmserve_options options = {.path = argv[1], .max_bytes = (size_t)8 << 30};
    shmserve_error error;
    check(!shmserve_connect(&options, &client, &error), &error);
    for (int i = 0; i < number; i++) {
        callers[i].took = malloc(MOST_CALLS * sizeof(int64_t));
        if (!callers[i].took || pthread_create(&callers[i].thread, NULL, call, &callers[i])) return perror("thread"), 1;
    }
    int64_t *all = malloc((size_t)number * MOST_CALLS * sizeof *all);
    size_t count = 0;
    if (!all) return perror("memory"), 1;
    for (int i = 0; i < number; i++) {
        pthread_join(callers[i].thread, NULL);
        for (size_t n = 0; n < callers[i].count; n++) all[count++] = callers[i].took[n];
        free(callers[i].took);
    }
    qsort(all, count, sizeof *all, by_value);
    printf("p50 %.1f us  p99 %.1f us  %.0f/s\n", (double)all[count / 2] / 1e3, (double)all[count * 99 / 100] / 1e3,
           (double)count / ((double)lasting_ns / 1e9));
    free(all);
    shmserve_close(client);
    return 0;
}
