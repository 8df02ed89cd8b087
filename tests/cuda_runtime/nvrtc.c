/* NVRTC: programs are compiled by compile.py, which runs g++. */
#include "standin.h"

#include <errno.h>
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SUCCESS, OUT_OF_MEMORY, INVALID_INPUT = 3, INVALID_PROGRAM = 4, COMPILATION = 6,
       NO_SUCH_NAME = 10 };
enum { MAX_NAMES = 64, MAX_OPTIONS = 64 };
extern char **environ;

struct text { char *bytes; size_t size; };

struct program {
    struct text source, code, log;
    int names;
    char *name[MAX_NAMES], *lowered[MAX_NAMES];
};

PUBLIC int nvrtcVersion(int *major, int *minor)
{
    int version;
    cudaRuntimeGetVersion(&version);
    *major = version / 1000;
    *minor = version % 1000 / 10;
    return SUCCESS;
}

static const int ARCHITECTURES[] = {80, 86, 89, 90, 100, 103, 120};

PUBLIC int nvrtcGetNumSupportedArchs(int *count)
{
    *count = sizeof ARCHITECTURES / sizeof *ARCHITECTURES;
    return SUCCESS;
}

PUBLIC int nvrtcGetSupportedArchs(int *architectures)
{
    memcpy(architectures, ARCHITECTURES, sizeof ARCHITECTURES);
    return SUCCESS;
}

PUBLIC const char *nvrtcGetErrorString(int status)
{
    return status == SUCCESS ? "NVRTC_SUCCESS"
           : status == COMPILATION ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_INVALID_INPUT";
}

PUBLIC int nvrtcCreateProgram(struct program **program, const char *source, const char *name,
                              int headers, const char *const *sources, const char *const *names)
{
    (void)name, (void)sources, (void)names;
    if (headers) return INVALID_INPUT;
    *program = calloc(1, sizeof **program);
    if (!*program) return OUT_OF_MEMORY;
    (*program)->source = (struct text){strdup(source), strlen(source)};
    return SUCCESS;
}

PUBLIC int nvrtcDestroyProgram(struct program **program)
{
    struct program *gone = *program;
    for (int k = 0; k < gone->names; k++) {
        free(gone->name[k]);
        free(gone->lowered[k]);
    }
    free(gone->source.bytes);
    free(gone->code.bytes);
    free(gone->log.bytes);
    free(gone);
    *program = NULL;
    return SUCCESS;
}

PUBLIC int nvrtcAddNameExpression(struct program *program, const char *expression)
{
    if (program->names == MAX_NAMES) return INVALID_INPUT;
    char lowered[32];
    snprintf(lowered, sizeof lowered, "expression_%d", program->names);
    program->name[program->names] = strdup(expression);
    program->lowered[program->names++] = strdup(lowered);
    return SUCCESS;
}

PUBLIC int nvrtcGetLoweredName(struct program *program, const char *expression, const char **lowered)
{
    for (int k = 0; k < program->names; k++)
        if (!strcmp(program->name[k], expression)) {
            *lowered = program->lowered[k];
            return SUCCESS;
        }
    return NO_SUCH_NAME;
}

/* ------------------------------------------------------------------------------------ compiling */

static struct text content(const char *path)
{
    struct text text = {NULL, 0};
    FILE *file = fopen(path, "re");
    struct stat about;
    if (file && !fstat(fileno(file), &about)) {
        text.bytes = calloc(1, (size_t)about.st_size + 1);
        text.size = fread(text.bytes, 1, (size_t)about.st_size, file);
    }
    if (file) fclose(file);
    if (!text.bytes) text.bytes = calloc(1, 1);
    return text;
}

static int run_compiler(struct program *program, const char *folder, int count,
                        const char *const *options)
{
    const char *words[2 * MAX_NAMES + MAX_OPTIONS + 4] = {COMPILER, folder};
    int at = 2;
    for (int k = 0; k < program->names; k++) {
        words[at++] = "--name";
        words[at++] = program->name[k];
    }
    words[at++] = "--";
    for (int k = 0; k < count && k < MAX_OPTIONS; k++) words[at++] = options[k];
    pid_t pid;
    int status;
    if (posix_spawnp(&pid, words[0], NULL, NULL, (char **)words, environ)) return COMPILATION;
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR) return COMPILATION;
    return status ? COMPILATION : SUCCESS;
}

PUBLIC int nvrtcCompileProgram(struct program *program, int count, const char *const *options)
{
    char folder[256], path[300];
    const char *parent = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/nvrtc-XXXXXX", parent ? parent : "/tmp");
    if (!mkdtemp(folder)) return OUT_OF_MEMORY;
    snprintf(path, sizeof path, "%s/program.cu", folder);
    FILE *file = fopen(path, "we");
    if (file) {
        fwrite(program->source.bytes, 1, program->source.size, file);
        fclose(file);
    }
    int status = run_compiler(program, folder, count, options);
    struct text *texts[] = {&program->code, &program->log, NULL};
    const char *names[] = {"code", "log", "program.cu"};
    for (int k = 0; k < 3; k++) {
        snprintf(path, sizeof path, "%s/%s", folder, names[k]);
        if (texts[k]) {
            free(texts[k]->bytes);
            *texts[k] = content(path);
        }
        unlink(path);
    }
    rmdir(folder);
    return status;
}

/* -------------------------------------------------------------------------------------- results */

static int size_of(const struct text *text, size_t *bytes, size_t end)
{
    *bytes = text->size + end;
    return text->bytes ? SUCCESS : INVALID_PROGRAM;
}

static int give(const struct text *text, char *target, size_t end)
{
    if (text->bytes) memcpy(target, text->bytes, text->size + end);
    return text->bytes ? SUCCESS : INVALID_PROGRAM;
}

PUBLIC int nvrtcGetPTXSize(struct program *program, size_t *bytes) { return size_of(&program->code, bytes, 1); }
PUBLIC int nvrtcGetPTX(struct program *program, char *code) { return give(&program->code, code, 1); }
PUBLIC int nvrtcGetCUBINSize(struct program *program, size_t *bytes) { return size_of(&program->code, bytes, 0); }
PUBLIC int nvrtcGetCUBIN(struct program *program, char *code) { return give(&program->code, code, 0); }
PUBLIC int nvrtcGetProgramLogSize(struct program *program, size_t *bytes) { return size_of(&program->log, bytes, 1); }
PUBLIC int nvrtcGetProgramLog(struct program *program, char *log) { return give(&program->log, log, 1); }
