/* Ask the model `digits` which digit 64 grey values show. */
#include <stdio.h>
#include "shmserve.h"

int main(void) {
    shmserve_client *client;
    shmserve_lane *lane;
    shmserve_error error;
    if (shmserve_connect(NULL, &client, &error) || shmserve_lane_open(client, "digits", "", 0, &lane, &error))
        return fprintf(stderr, "%s\n", error.text), 1;
    float image[64] = {0};
    for (int row = 0; row < 8; row++) image[8 * row + 3] = image[8 * row + 4] = 16; /* a stroke */
    shmserve_tensor input = {"image", SHMSERVE_FP32, 2, (int64_t[]){8, 8}, image, sizeof image};
    shmserve_output output = {.name = "label"};
    shmserve_request request = {.inputs = &input, .input_count = 1, .outputs = &output, .output_count = 1};
    const shmserve_answer *answer;
    if (shmserve_infer(lane, &request, &answer, &error)) return fprintf(stderr, "%s\n", error.text), 1;
    printf("a %lld\n", (long long)*(const int64_t *)answer->outputs[0].data);
    shmserve_lane_close(lane), shmserve_close(client);
}
