/* The runtime's calls, as CuPy and programs have them; "NVIDIA CUDA Runtime API" 12.9 and 13.0 say
 * what they are to do. What is not here answers "not supported" (site/sitecustomize.py). */
#include "standin.h"

#define ADDRESS(pointer) ((uint64_t)(uintptr_t)(pointer))

/* ------------------------------------------------------------------------------------ versions */

static int version(void) { return setting("VERSION", "12")[1] == '3' ? 13000 : 12090; }

PUBLIC int cudaDriverGetVersion(int *number)
{
    begin_bare(__func__);
    *number = has_driver() ? version() : 0;
    return finish(OK);
}

PUBLIC int cuDriverGetVersion(int *number) { return cudaDriverGetVersion(number); }

PUBLIC int cudaRuntimeGetVersion(int *number)
{
    *number = version();
    return OK;
}

PUBLIC int cudaGetLastError(void) { return take_last_error(true); }
PUBLIC int cudaPeekAtLastError(void) { return take_last_error(false); }

/* Where the calls go that are not here. */
PUBLIC int standin_missing(void)
{
    begin_bare("standin_missing");
    return finish(NOT_SUPPORTED);
}

/* ------------------------------------------------------------------------------------- devices */

QUERY(cudaGetDeviceCount, (int *count), (*count = devices.count, OK))
QUERY(cudaGetDevice, (int *ordinal), (*ordinal = thread.device, OK))

/* Makes a context there, as from CUDA 12 on. */
PUBLIC int cudaSetDevice(int ordinal)
{
    BEGIN;
    if (!is_device(ordinal)) return finish(INVALID_DEVICE);
    thread.device = ordinal;
    thread.chosen = devices.at[ordinal].context = true;
    return finish(OK);
}

CALL(cudaDeviceSynchronize, (void), wait_device(thread.device))

PUBLIC int cudaDeviceCanAccessPeer(int *can, int ordinal, int peer)
{
    BEGIN;
    if (!is_device(ordinal) || !is_device(peer)) return finish(INVALID_DEVICE);
    *can = can_access_peer(ordinal, peer);
    return finish(OK);
}

PUBLIC int cudaDeviceEnablePeerAccess(int peer, unsigned flags)
{
    BEGIN_CONTEXT;
    if (flags) return finish(INVALID_VALUE);
    if (!is_device(peer) || peer == thread.device) return finish(INVALID_DEVICE);
    if (!can_access_peer(thread.device, peer)) return finish(NO_PEER);
    bool *enabled = &devices.at[thread.device].peers[peer];
    int status = *enabled ? PEER_ENABLED : OK;
    *enabled = true;
    return finish(status);
}

PUBLIC int cudaDeviceDisablePeerAccess(int peer)
{
    BEGIN_CONTEXT;
    if (!is_device(peer)) return finish(INVALID_DEVICE);
    bool *enabled = &devices.at[thread.device].peers[peer];
    int status = *enabled ? OK : PEER_NOT_ENABLED;
    *enabled = false;
    return finish(status);
}

/* -------------------------------------------------------------------------------------- memory */

CALL(cudaMalloc, (uint64_t *address, size_t bytes), memory_new(address, bytes))
CALL(cudaFree, (uint64_t address), memory_free(address))
CALL(cudaMemGetInfo, (size_t *unused, size_t *all),
     (*all = device_bytes(), *unused = *all - used(thread.device), OK))
CALL(cudaHostAlloc, (void **address, size_t bytes, unsigned flags), host_new(address, bytes, flags))

PUBLIC int cudaMallocHost(void **address, size_t bytes) { return cudaHostAlloc(address, bytes, 0); }

CALL(cudaFreeHost, (void *address), host_free(ADDRESS(address)))
CALL(cudaHostRegister, (void *address, size_t bytes, unsigned flags),
     host_pin(ADDRESS(address), bytes, flags))
CALL(cudaHostUnregister, (void *address), host_unpin(ADDRESS(address)))

/* What 12 and 13 have in common of cudaPointerAttributes. */
struct pointer_attributes {
    int type, device;
    uint64_t on_device, on_host;
};

PUBLIC int cudaPointerGetAttributes(struct pointer_attributes *told, uint64_t address)
{
    enum { UNREGISTERED, HOST, DEVICE };
    BEGIN;
    struct allocation *found = find_alive(address, 1);
    if (found)
        *told = (struct pointer_attributes){DEVICE, found->device, address, 0};
    else if (find_host(address))
        *told = (struct pointer_attributes){HOST, thread.device, address, address};
    else
        *told = (struct pointer_attributes){UNREGISTERED, -2, 0, 0};
    return finish(OK);
}

/* ----------------------------------------------------------------------------------------- IPC */

struct ipc_handle { unsigned char bytes[64]; };

CALL(cudaIpcGetMemHandle, (struct ipc_handle *handle, uint64_t address),
     memory_handle(handle->bytes, address))
CALL(cudaIpcOpenMemHandle, (uint64_t *address, struct ipc_handle handle, unsigned flags),
     memory_open(address, handle.bytes, flags))
CALL(cudaIpcCloseMemHandle, (uint64_t address), memory_close(address))
EVENT_CALL(cudaIpcGetEventHandle, (struct ipc_handle *handle, void *number),
           event_handle(handle->bytes, event))
CALL(cudaIpcOpenEventHandle, (struct event **event, struct ipc_handle handle),
     event_open(event, handle.bytes))

/* -------------------------------------------------------------------------------------- copies */

STREAM_CALL(cudaMemcpyAsync, (uint64_t target, uint64_t source, size_t bytes, int kind, void *number),
            copy(target, source, bytes, kind, stream))

/* On the default stream. The host waits, unless both are device memory. */
PUBLIC int cudaMemcpy(uint64_t target, uint64_t source, size_t bytes, int kind)
{
    BEGIN_CONTEXT;
    struct stream *stream = stream_of(NULL);
    int status = copy(target, source, bytes, kind, stream);
    if (!status && !(find(target) && find(source))) status = wait_stream(stream, FOREVER);
    return finish(status);
}

static int copy_between(uint64_t target, int to, uint64_t source, int from, size_t bytes,
                        struct stream *stream)
{
    if (!is_device(to) || !is_device(from)) return INVALID_DEVICE;
    struct allocation *there = find_alive(target, bytes), *here = find_alive(source, bytes);
    if (bytes && (!there || !here || there->device != to || here->device != from)) {
        finding("wrong device", "a copy from device %d to %d of memory that is elsewhere", from, to);
        return INVALID_VALUE;
    }
    return copy(target, source, bytes, 3, stream);
}

STREAM_CALL(cudaMemcpyPeerAsync, (uint64_t target, int to, uint64_t source, int from, size_t bytes, void *number),
            copy_between(target, to, source, from, bytes, stream))

/* Waits for both devices. Works without peer access: the driver takes another way then. */
PUBLIC int cudaMemcpyPeer(uint64_t target, int to, uint64_t source, int from, size_t bytes)
{
    BEGIN_CONTEXT;
    if (!is_device(to) || !is_device(from)) return finish(INVALID_DEVICE);
    struct stream *stream = stream_of(NULL);
    int status = wait_device(to);
    if (!status) status = wait_device(from);
    if (!status) status = copy_between(target, to, source, from, bytes, stream);
    return finish(status ? status : wait_stream(stream, FOREVER));
}

STREAM_CALL(cudaMemsetAsync, (uint64_t target, int value, size_t bytes, void *number),
            fill(target, value, bytes, stream))

PUBLIC int cudaMemset(uint64_t target, int value, size_t bytes)
{
    return cudaMemsetAsync(target, value, bytes, NULL);
}
