"""The CUDA runtime's functions, by CuPy's names."""

from __future__ import annotations

from typing import NamedTuple

import fake_devices

from cupy import _fake, _queues
from cupy._fake import CUDARuntimeError as CUDARuntimeError

is_hip = False
memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = range(4)
memcpyDefault = 4
memoryTypeUnregistered, memoryTypeHost, memoryTypeDevice, memoryTypeManaged = range(4)
cudaIpcMemLazyEnablePeerAccess = 1
cudaDevAttrHostRegisterSupported = 99
cudaDevAttrHostRegisterReadOnlySupported = 113
eventDefault, eventBlockingSync, eventDisableTiming, eventInterprocess = 0, 1, 2, 4
streamDefault, streamNonBlocking, streamLegacy, streamPerThread = 0, 1, 1, 2
hostAllocDefault, hostAllocPortable, hostAllocMapped, hostAllocWriteCombined = 0, 1, 2, 4

getDevice = _fake.get_device
setDevice = _fake.set_device
malloc = _fake.malloc
ipcGetMemHandle = _fake.get_handle
ipcCloseMemHandle = _fake.close_handle
hostRegister = _fake.pin
hostUnregister = _fake.unpin


class PointerAttributes(NamedTuple):
    device: int
    devicePointer: int
    hostPointer: int
    type: int


# ------------------------------------------------------------------------------------ devices


def getDeviceCount() -> int:
    _fake.enter()
    return len(_fake.devices)


def driverGetVersion() -> int:
    return 12080 if fake_devices.has_driver() else 0


def runtimeGetVersion() -> int:
    return 12080


def getDeviceProperties(device: int) -> dict[str, object]:
    _fake.check_device(device)
    chosen = _fake.devices[device]
    return {
        "name": fake_devices.NAME.encode(),
        "uuid": chosen.uuid.bytes,
        "totalGlobalMem": fake_devices.memory_bytes(),
        "major": 9,
        "minor": 0,
        "multiProcessorCount": 1,
        "pciDomainID": 0,
        "pciBusID": chosen.index + 1,
        "pciDeviceID": 0,
    }


def deviceGetAttribute(attribute: int, device: int) -> int:
    _fake.check_device(device)
    known = {cudaDevAttrHostRegisterSupported: 1, cudaDevAttrHostRegisterReadOnlySupported: 1}
    if attribute not in known:
        raise CUDARuntimeError(1)
    return known[attribute]


def deviceGetPCIBusId(device: int) -> str:
    _fake.check_device(device)
    return f"0000:{_fake.devices[device].index + 1:02X}:00.0"


def deviceSynchronize() -> None:
    _queues.wait_device(getDevice())


def deviceCanAccessPeer(device: int, peer: int) -> int:
    return int(_fake.can_access_peer(device, peer))


def deviceEnablePeerAccess(peer: int) -> None:
    pair = getDevice(), peer
    if not _fake.can_access_peer(*pair):
        raise CUDARuntimeError(101 if pair[0] == peer else 217)
    if pair in _fake.peers:
        raise CUDARuntimeError(704)
    _fake.peers.add(pair)


# ------------------------------------------------------------------------------------- memory


def free(pointer: int) -> None:
    """Waits for the device, as the real one does."""
    found = _fake.find(pointer)
    if found is not None:
        _queues.wait_device(found.device)
    _fake.free(pointer)


def memGetInfo() -> tuple[int, int]:
    """Free and all bytes of the current device."""
    total = fake_devices.memory_bytes()
    return total - _fake.used(getDevice()), total


def hostAlloc(nbytes: int, flags: int) -> int:
    _fake.enter()
    if nbytes == 0:
        return 0
    address = _fake.map_memory(nbytes)
    _fake.host_memory[address] = nbytes
    return address


def freeHost(pointer: int) -> None:
    for device in range(getDeviceCount()):
        _queues.wait_device(device)
    if pointer and pointer not in _fake.host_memory:
        raise CUDARuntimeError(1)
    if pointer:
        _fake.unmap_memory(pointer, _fake.host_memory.pop(pointer))


def pointerGetAttributes(pointer: int) -> PointerAttributes:
    _fake.enter()
    found = _fake.find(pointer)
    if found is not None:
        return PointerAttributes(found.device, pointer, 0, memoryTypeDevice)
    host = [*_fake.host_memory.items(), *((a, n) for a, (n, _) in _fake.pinned.items())]
    if any(a <= pointer < a + n for a, n in host):
        return PointerAttributes(getDevice(), pointer, pointer, memoryTypeHost)
    return PointerAttributes(-2, 0, 0, memoryTypeUnregistered)


def ipcOpenMemHandle(handle: bytes, flags: int = cudaIpcMemLazyEnablePeerAccess) -> int:
    return _fake.open_handle(bytes(handle), flags)


# ------------------------------------------------------------------------------------- copies


def memcpy(dst: int, src: int, size: int, kind: int) -> None:
    """On the default stream. The host waits, unless both are device memory."""
    queue = _queues.get(0)
    order = _queues.add_copy(queue, dst, src, size, kind)
    if not (_fake.find(dst) and _fake.find(src)):
        queue.wait(order)


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    _queues.add_copy(_queues.get(stream), dst, src, size, kind)


def _between(dst: int, dst_device: int, src: int, src_device: int) -> None:
    for pointer, device in ((dst, dst_device), (src, src_device)):
        _fake.check_device(device)
        found = _fake.find(pointer)
        if found is None or found.device != device:
            raise CUDARuntimeError(1)


def memcpyPeer(dst: int, dstDevice: int, src: int, srcDevice: int, size: int) -> None:
    """Works without peer access too, as the driver then copies through host memory."""
    _between(dst, dstDevice, src, srcDevice)
    for device in (dstDevice, srcDevice):
        _queues.wait_device(device)
    queue = _queues.get(0)
    queue.wait(_queues.add_copy(queue, dst, src, size, memcpyDeviceToDevice))


def memcpyPeerAsync(
    dst: int, dstDevice: int, src: int, srcDevice: int, size: int, stream: int
) -> None:
    _between(dst, dstDevice, src, srcDevice)
    _queues.add_copy(_queues.get(stream), dst, src, size, memcpyDeviceToDevice)


def memset(ptr: int, value: int, size: int) -> None:
    """On the default stream; the host does not wait."""
    _queues.add_fill(_queues.get(0), ptr, value, size)


def memsetAsync(ptr: int, value: int, size: int, stream: int) -> None:
    _queues.add_fill(_queues.get(stream), ptr, value, size)


# ------------------------------------------------------------------------------------ streams


def streamCreateWithFlags(flags: int) -> int:
    return _queues.create(blocking=not flags & streamNonBlocking).number


def streamCreate() -> int:
    return streamCreateWithFlags(streamDefault)


def streamDestroy(stream: int) -> None:
    _queues.destroy(_queues.get(stream).number)


def streamSynchronize(stream: int) -> None:
    _queues.get(stream).wait()
