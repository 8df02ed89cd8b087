/* A program for the sanitizers' builds: threads that use all of the stand-in at once, and a second
 * process that opens what the first one has. `make check` runs it. */
#include "standin.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 4, ROUNDS = 50, BYTES = 1 << 16, TO_DEVICE = 1, TO_HOST = 2 };

struct ipc_handle { unsigned char bytes[64]; };
int cudaSetDevice(int), cudaMalloc(uint64_t *, size_t), cudaFree(uint64_t), cudaDeviceSynchronize(void);
int cudaStreamCreateWithFlags(void **, unsigned), cudaStreamDestroy(void *), cudaStreamSynchronize(void *);
int cudaStreamWaitEvent(void *, void *, unsigned), cudaStreamQuery(void *);
int cudaEventCreateWithFlags(void **, unsigned), cudaEventDestroy(void *), cudaEventRecord(void *, void *);
int cudaMemcpyAsync(uint64_t, uint64_t, size_t, int, void *), cudaMemsetAsync(uint64_t, int, size_t, void *);
int cudaHostRegister(void *, size_t, unsigned), cudaHostUnregister(void *);
int cudaIpcGetMemHandle(struct ipc_handle *, uint64_t), cudaIpcCloseMemHandle(uint64_t);
int cudaIpcOpenMemHandle(uint64_t *, struct ipc_handle, unsigned), cudaMemcpy(uint64_t, uint64_t, size_t, int);
int cudaLaunchHostFunc(void *, void (*)(void *), void *);
unsigned standin_findings(char *, size_t), standin_leaks(void);

#define DO(call)                                                       \
    do {                                                               \
        int status = call;                                             \
        if (status) {                                                  \
            fprintf(stderr, "line %d: status %d\n", __LINE__, status); \
            exit(1);                                                   \
        }                                                              \
    } while (0)
#define ADDRESS(pointer) ((uint64_t)(uintptr_t)(pointer))

static void count(void *number) { ++*(int *)number; }

static void *work(void *argument)
{
    int number = (int)(intptr_t)argument, called = 0;
    void *ahead, *stream, *event;
    unsigned char *host = aligned_alloc(4096, BYTES), *back = malloc(BYTES);
    DO(cudaSetDevice(number % 2));
    DO(cudaHostRegister(host, BYTES, 1));
    DO(cudaStreamCreateWithFlags(&ahead, 1));
    DO(cudaStreamCreateWithFlags(&stream, 1));
    DO(cudaEventCreateWithFlags(&event, 2));
    for (int k = 0; k < ROUNDS; k++) {
        uint64_t memory;
        memset(host, number + k, BYTES);
        DO(cudaMalloc(&memory, BYTES));
        DO(cudaMemcpyAsync(memory, ADDRESS(host), BYTES, TO_DEVICE, ahead));
        DO(cudaEventRecord(event, ahead));
        DO(cudaStreamWaitEvent(stream, event, 0));
        DO(cudaMemsetAsync(memory, 7, 16, stream));
        DO(cudaMemcpyAsync(ADDRESS(back), memory, BYTES, TO_HOST, stream));
        DO(cudaLaunchHostFunc(stream, count, &called));
        DO(cudaStreamSynchronize(stream));
        if (back[0] != 7 || back[16] != (unsigned char)(number + k)) exit(2);
        DO(cudaFree(memory));
    }
    if (called != ROUNDS) exit(3);
    DO(cudaEventDestroy(event));
    DO(cudaStreamDestroy(ahead));
    DO(cudaStreamDestroy(stream));
    DO(cudaHostUnregister(host));
    free(host);
    free(back);
    return NULL;
}

static int open_other(const char *hex)
{
    struct ipc_handle handle;
    uint64_t memory;
    unsigned char first;
    for (int k = 0; k < 64; k++) sscanf(hex + 2 * k, "%2hhx", &handle.bytes[k]);
    DO(cudaIpcOpenMemHandle(&memory, handle, 1));
    DO(cudaMemcpy(ADDRESS(&first), memory, 1, TO_HOST));
    DO(cudaIpcCloseMemHandle(memory));
    return first == 42 ? 0 : 4;
}

static void share(const char *program)
{
    struct ipc_handle handle;
    uint64_t memory;
    char hex[129];
    int status;
    DO(cudaMalloc(&memory, 512));
    DO(cudaMemsetAsync(memory, 42, 512, NULL));
    DO(cudaDeviceSynchronize());
    DO(cudaIpcGetMemHandle(&handle, memory));
    for (int k = 0; k < 64; k++) sprintf(hex + 2 * k, "%02x", handle.bytes[k]);
    pid_t pid = fork();
    if (!pid) {
        execl(program, program, hex, NULL);
        _exit(5);
    }
    if (waitpid(pid, &status, 0) < 0 || status) exit(6);
    DO(cudaFree(memory));
}

int main(int count_, char **words)
{
    if (count_ > 1) return open_other(words[1]);
    pthread_t threads[THREADS];
    for (intptr_t k = 0; k < THREADS; k++) pthread_create(&threads[k], NULL, work, (void *)k);
    for (int k = 0; k < THREADS; k++) pthread_join(threads[k], NULL);
    share(words[0]);
    char last[400] = "";
    unsigned found = standin_leaks() + standin_findings(last, sizeof last);
    if (found) fprintf(stderr, "%u findings, the last one: %s\n", found, last);
    return found ? 7 : 0;
}
