/* The driver's calls: contexts, modules, kernels. A module is a shared object that compile.py has
 * made of a program; for each kernel it has a `standin_kernel_NAME` (include/standin_kernel.h). */
#include "standin.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "include/standin_kernel.h"

struct module {
    struct module *next;
    void *library;
};
static struct module *modules;

PUBLIC int cuInit(unsigned flags)
{
    if (!has_driver()) return NO_DEVICE;
    return flags ? INVALID_VALUE : OK;
}

PUBLIC int cuGetErrorName(int status, const char **name)
{
    static const struct { int status; const char *name; } NAMES[] = {
        {OK, "CUDA_SUCCESS"}, {INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"},
        {NO_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY"}, {INVALID_IMAGE, "CUDA_ERROR_INVALID_IMAGE"},
        {NO_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT"}, {INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE"},
        {NOT_FOUND, "CUDA_ERROR_NOT_FOUND"}, {ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS"},
        {NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED"},
    };
    for (size_t k = 0; k < sizeof NAMES / sizeof *NAMES; k++)
        if (NAMES[k].status == status) {
            *name = NAMES[k].name;
            return OK;
        }
    *name = "CUDA_ERROR_UNKNOWN";
    return OK;
}

PUBLIC int cuGetErrorString(int status, const char **text) { return cuGetErrorName(status, text); }

/* ------------------------------------------------------------------------------------ contexts */

/* A context is known by its device; 0: the thread has none yet. */
QUERY(cuCtxGetCurrent, (uint64_t *context),
      (*context = thread.chosen ? 0x100 + (uint64_t)thread.device : 0, OK))

PUBLIC int cuCtxSetCurrent(uint64_t context)
{
    BEGIN;
    int ordinal = (int)(context - 0x100);
    if (context && (!is_device(ordinal) || !devices.at[ordinal].context)) return finish(NO_CONTEXT);
    thread.chosen = context != 0;
    if (context) thread.device = ordinal;
    return finish(OK);
}

QUERY(cuCtxGetDevice, (int *ordinal), (*ordinal = thread.device, thread.chosen ? OK : NO_CONTEXT))

/* Bit k is set if the process has a context on device k. */
PUBLIC unsigned standin_contexts(void)
{
    unsigned mask = 0;
    for (int k = 0; k < devices.count; k++) mask |= (unsigned)devices.at[k].context << k;
    return mask;
}

PUBLIC int cuMemGetAddressRange_v2(uint64_t *base, size_t *bytes, uint64_t address)
{
    BEGIN;
    struct allocation *found = find_alive(address, 1);
    if (!found) return finish(INVALID_VALUE);
    if (base) *base = found->base;
    if (bytes) *bytes = found->bytes;
    return finish(OK);
}

/* ------------------------------------------------------------------------------------- modules */


/* Of a file with a name of its own: a name that was opened before would be the library it was. */
static void *load(const char *code, size_t bytes)
{
    char path[256];
    const char *parent = getenv("TMPDIR");
    snprintf(path, sizeof path, "%s/kernel-XXXXXX", parent ? parent : "/tmp");
    int fd = mkostemp(path, O_CLOEXEC);
    if (fd < 0) return NULL;
    bool written = write(fd, code, bytes) == (ssize_t)bytes;
    close(fd);
    void *library = written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : NULL;
    unlink(path);
    return library;
}

PUBLIC int cuModuleLoadData(struct module **module, const void *data)
{
    BEGIN_CONTEXT;
    uint64_t bytes;
    if (memcmp(data, STANDIN_MAGIC, 8)) return finish(INVALID_IMAGE);
    memcpy(&bytes, (const char *)data + 8, sizeof bytes);
    void *library = load((const char *)data + 16, bytes);
    if (!library) return finish(INVALID_IMAGE);
    *module = malloc(sizeof **module);
    **module = (struct module){modules, library};
    modules = *module;
    return finish(OK);
}

/* Kernels that are queued may need it, so the library stays. */
PUBLIC int cuModuleUnload(struct module *module)
{
    BEGIN;
    struct module **place = &modules;
    while (*place && *place != module) place = &(*place)->next;
    if (!*place) return finish(INVALID_HANDLE);
    *place = module->next;
    free(module);
    return finish(OK);
}

PUBLIC int cuModuleGetFunction(const struct standin_kernel **kernel, struct module *module,
                               const char *name)
{
    BEGIN;
    char symbol[1024];
    snprintf(symbol, sizeof symbol, "standin_kernel_%s", name);
    *kernel = dlsym(module->library, symbol);
    return finish(*kernel ? OK : NOT_FOUND);
}

PUBLIC int cuFuncGetAttribute(int *value, int attribute, const struct standin_kernel *kernel)
{
    enum { MAX_THREADS, REGISTERS = 4 };
    BEGIN;
    (void)kernel;
    *value = attribute == MAX_THREADS ? 1024 : attribute == REGISTERS ? 32 : 0;
    return finish(OK);
}

QUERY(cuFuncSetAttribute, (const struct standin_kernel *kernel, int attribute, int value),
      ((void)kernel, (void)attribute, (void)value, OK))

void modules_leaks(void)
{
    for (struct module *one = modules; one; one = one->next) finding("leak", "a module");
}

/* ------------------------------------------------------------------------------------- kernels */

enum { MAX_ARGUMENTS = 64 };

struct launch {
    const struct standin_kernel *kernel;
    unsigned grid[3], block[3];
    size_t shared;
    int device;
    void *arguments[MAX_ARGUMENTS];
    struct span spans[MAX_ARGUMENTS];
    int count;
    unsigned char values[];
};

static void run_blocks(void *argument)
{
    struct launch *launch = argument;
    launch->kernel->run(launch->arguments, launch->grid, launch->block, launch->shared);
}

/* Whether it may touch what its arguments point to. */
static bool may_touch(const struct launch *launch)
{
    for (int k = 0; k < launch->count; k++) {
        const struct span *span = &launch->spans[k];
        struct allocation *found = find(span->address);
        if (!found) continue;
        if (!find_alive(span->address, span->bytes)) {
            finding(found->alive ? "out of bounds" : "use after free", "%s, %zu bytes",
                    launch->kernel->name, span->bytes);
            return false;
        }
        if (!reaches(launch->device, found->device)) {
            finding("wrong device", "%s on device %d touches memory of device %d",
                    launch->kernel->name, launch->device, found->device);
            return false;
        }
    }
    return true;
}

static int run_kernel(struct op *op)
{
    struct launch *launch = op->data;
    uint64_t fault = 0;
    if (!may_touch(launch)) return lose(ILLEGAL_ADDRESS);
    if (survives(run_blocks, launch, &fault)) return OK;
    struct allocation *found = find(fault);
    finding(found && !found->alive ? "use after free" : "out of bounds", "%s", launch->kernel->name);
    return lose(ILLEGAL_ADDRESS);
}

PUBLIC int cuLaunchKernel(const struct standin_kernel *kernel, unsigned grid_x, unsigned grid_y,
                          unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                          unsigned shared, void *number, void **parameters, void **extra)
{
    BEGIN_CONTEXT;
    struct stream *stream = stream_of(number);
    if (!stream) return finish(INVALID_HANDLE);
    if (stream->device != thread.device) {
        finding("wrong device", "%s on a stream of device %d, while %d is chosen", kernel->name,
                stream->device, thread.device);
        return finish(INVALID_HANDLE);
    }
    if (extra || kernel->count > MAX_ARGUMENTS || !grid_x || !grid_y || !grid_z || !block_x ||
        !block_y || !block_z || block_x * block_y * block_z > 1024)
        return finish(INVALID_VALUE);
    size_t bytes = 0;
    for (int k = 0; k < kernel->count; k++) bytes += (kernel->sizes[k] + 15) / 16 * 16;
    struct launch *launch = aligned_alloc(16, (sizeof *launch + bytes + 15) / 16 * 16);
    *launch = (struct launch){
        .kernel = kernel, .grid = {grid_x, grid_y, grid_z}, .block = {block_x, block_y, block_z},
        .shared = shared, .device = thread.device,
    };
    unsigned char *at = (unsigned char *)(((uintptr_t)launch->values + 15) / 16 * 16);
    for (int k = 0; k < kernel->count; at += (kernel->sizes[k++] + 15) / 16 * 16)
        launch->arguments[k] = memcpy(at, parameters[k], kernel->sizes[k]);
    struct standin_span told[MAX_ARGUMENTS];
    int spans = kernel->spans(launch->arguments, told);
    for (int k = 0; k < spans; k++) {
        if (!told[k].bytes) continue;
        launch->spans[launch->count++] =
            (struct span){told[k].address, told[k].bytes, told[k].write};
    }
    struct op *op = op_new(kernel->name, run_kernel);
    op->data = launch;
    enqueue(stream, op, launch->spans, launch->count);
    return finish(OK);
}
