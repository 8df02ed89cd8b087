/* The one lock, the errors, and what is told of mistakes. */
#include "standin.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

_Thread_local struct thread_state thread;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int lost_with;
static pid_t owner;

enum { MAX_CALLS = 256, LINE = 400 };
static struct { const char *name; unsigned count; } calls[MAX_CALLS];

const char *setting(const char *name, const char *otherwise)
{
    char full[64];
    snprintf(full, sizeof full, "FAKE_CUDA_%s", name);
    const char *value = getenv(full);
    return value ? value : otherwise;
}

/* One write, so that lines of several processes do not mix. */
static void append(const char *path, const char *line, size_t bytes)
{
    int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
    if (fd >= 0) {
        if (write(fd, line, bytes) < 0) errno = 0;
        close(fd);
    }
}

static struct { unsigned count; char last[LINE]; } told;

void finding(const char *kind, const char *format, ...)
{
    char line[LINE];
    int at = snprintf(line, sizeof line, "%d %s: ", getpid(), kind);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(line + at, sizeof line - at - 1, format, arguments);
    va_end(arguments);
    told.count++;
    memcpy(told.last, line, sizeof line);
    const char *path = setting("FINDINGS", "");
    strcat(line, "\n");
    if (*path) append(path, line, strlen(line));
}

/* How many findings there are, and the last one: "PID KIND: TEXT". */
PUBLIC unsigned standin_findings(char *last, size_t bytes)
{
    pthread_mutex_lock(&lock);
    if (last && bytes) snprintf(last, bytes, "%s", told.last);
    unsigned count = told.count;
    pthread_mutex_unlock(&lock);
    return count;
}

/* How often a call was made; the first time its name is a line of FAKE_CUDA_CALLS. */
static unsigned count_call(const char *name)
{
    int k = 0;
    while (k < MAX_CALLS && calls[k].name && strcmp(calls[k].name, name)) k++;
    if (k == MAX_CALLS) return 0;
    if (!calls[k].name) {
        calls[k].name = name;
        char line[80];
        int bytes = snprintf(line, sizeof line, "%s\n", name);
        const char *path = setting("CALLS", "");
        if (*path) append(path, line, (size_t)bytes);
    }
    return ++calls[k].count;
}

/* FAKE_CUDA_FAIL is NAME=STATUS or NAME=STATUS@N (the Nth call only), with commas between. */
static int fault(const char *name, unsigned count)
{
    const char *at = setting("FAIL", "");
    size_t bytes = strlen(name);
    while (*at) {
        if (!strncmp(at, name, bytes) && at[bytes] == '=') {
            char *end;
            int status = (int)strtol(at + bytes + 1, &end, 10);
            if (*end != '@' || strtoul(end + 1, NULL, 10) == count) return status;
        }
        at = strchr(at, ',');
        if (!at) break;
        at++;
    }
    return OK;
}

static bool is_sticky(int status)
{
    return status == ILLEGAL_ADDRESS || status == 46 || status == 214 || status == 220 ||
           status == 226 || status == 702 || status == 710 || (status >= 714 && status <= 721) ||
           status == 999;
}

int lose(int status)
{
    if (!lost_with) lost_with = status;
    return lost_with;
}

bool lost(void) { return lost_with != OK; }

int waited(void)
{
    const char *broken = setting("BROKEN", "");
    if (*broken && !access(broken, F_OK)) return lose(ILLEGAL_ADDRESS);
    return lost_with;
}

static int checked(const char *call)
{
    if (!owner) {
        owner = getpid();
        read_devices();
    }
    if (!has_driver()) return OLD_DRIVER;
    if (owner != getpid()) return NOT_INITIALIZED; /* CUDA does not survive a fork */
    if (!devices.count) return NO_DEVICE;
    int status = fault(call, count_call(call));
    if (is_sticky(status)) lose(status);
    if (lost_with) return lost_with;
    return thread.calling_back ? NOT_PERMITTED : status;
}

int begin(const char *call, bool context)
{
    pthread_mutex_lock(&lock);
    int status = checked(call);
    if (status) return finish(status);
    if (context) {
        devices.at[thread.device].context = true;
        thread.chosen = true;
    }
    return OK;
}

void begin_bare(const char *call)
{
    pthread_mutex_lock(&lock);
    count_call(call);
}

int finish(int status)
{
    if (status) thread.last_error = status;
    pthread_mutex_unlock(&lock);
    return status;
}

int take_last_error(bool reset)
{
    int status = thread.last_error;
    if (reset) thread.last_error = lost_with;
    return status;
}

void unlocked(void (*function)(void *), void *argument)
{
    thread.calling_back = true;
    pthread_mutex_unlock(&lock);
    function(argument);
    pthread_mutex_lock(&lock);
    thread.calling_back = false;
}

/* -------------------------------------------------------------------------------------- faults */

static _Thread_local sigjmp_buf *rescue;
static _Thread_local uint64_t fault_address;
static struct sigaction before[2];

static void caught(int number, siginfo_t *info, void *context)
{
    if (rescue) {
        fault_address = (uint64_t)(uintptr_t)info->si_addr;
        siglongjmp(*rescue, 1);
    }
    (void)context;
    sigaction(number, &before[number == SIGBUS], NULL); /* it happens again at once */
}

bool survives(void (*function)(void *), void *argument, uint64_t *fault)
{
    struct sigaction action = {.sa_sigaction = caught, .sa_flags = SA_SIGINFO | SA_NODEFER};
    sigjmp_buf here;
    sigaction(SIGSEGV, &action, &before[0]);
    sigaction(SIGBUS, &action, &before[1]);
    volatile bool whole = false;
    if (!sigsetjmp(here, 1)) {
        rescue = &here;
        function(argument);
        whole = true;
    }
    rescue = NULL;
    if (!whole && fault) *fault = fault_address;
    sigaction(SIGSEGV, &before[0], NULL);
    sigaction(SIGBUS, &before[1], NULL);
    return whole;
}

/* ------------------------------------------------------------------------------------- control */

/* Findings for all that was not given back; how many there were. */
PUBLIC unsigned standin_leaks(void)
{
    pthread_mutex_lock(&lock);
    unsigned already = told.count;
    memory_leaks();
    streams_leaks();
    events_leaks();
    modules_leaks();
    unsigned found = told.count - already;
    pthread_mutex_unlock(&lock);
    return found;
}

/* A process that is new to CUDA, for tests that share one: settings are read again. */
PUBLIC void standin_reset(void)
{
    pthread_mutex_lock(&lock);
    events_reset();
    streams_reset();
    memory_reset();
    race_reset();
    memset(calls, 0, sizeof calls);
    memset(&thread, 0, sizeof thread);
    memset(&told, 0, sizeof told);
    memset(&devices, 0, sizeof devices);
    lost_with = owner = 0;
    pthread_mutex_unlock(&lock);
}

PUBLIC bool standin_lost(void) { return lost(); }

__attribute__((destructor)) static void at_exit(void)
{
    if (owner == getpid() && !strcmp(setting("LEAKS", ""), "1")) standin_leaks();
}
