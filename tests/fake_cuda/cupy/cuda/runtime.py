"""The CUDA runtime's functions, by CuPy's names."""

from dataclasses import dataclass

import fake_devices

from cupy import _fake, _ipc, _queues
from cupy._fake import CUDARuntimeError

memcpyHostToHost, memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice = range(4)
memoryTypeUnregistered, memoryTypeHost, memoryTypeDevice = range(3)
cudaIpcMemLazyEnablePeerAccess = _ipc.LAZY_PEER_ACCESS
cudaDevAttrHostRegisterSupported = 99
cudaDevAttrHostRegisterReadOnlySupported = 113
streamDefault, streamNonBlocking, streamLegacy = 0, 1, 1

getDevice = _fake.get_device
setDevice = _fake.set_device
malloc = _fake.malloc
hostRegister = _fake.pin
ipcGetMemHandle = _ipc.get_handle
ipcOpenMemHandle = _ipc.open_handle
ipcCloseMemHandle = _ipc.close_handle


@dataclass(frozen=True)
class PointerAttributes:
    device: int
    devicePointer: int
    hostPointer: int
    type: int


# ------------------------------------------------------------------------------------ devices


def getDeviceCount() -> int:
    _fake.enter()
    return len(_fake.devices)


def driverGetVersion() -> int:
    return runtimeGetVersion() if fake_devices.has_driver() else 0


def runtimeGetVersion() -> int:
    return 12080


def getDeviceProperties(device: int) -> dict[str, object]:
    _fake.check_device(device)
    return {
        "name": fake_devices.NAME.encode(),
        "uuid": _fake.devices[device].uuid.bytes,
        "totalGlobalMem": fake_devices.memory_bytes(),
        "major": 9,
        "minor": 0,
        "pciDomainID": 0,
        "pciBusID": _fake.devices[device].index + 1,
        "pciDeviceID": 0,
    }


def deviceGetAttribute(attrib: int, device: int) -> int:
    _fake.check_device(device)
    if attrib == cudaDevAttrHostRegisterReadOnlySupported:
        return int(_fake.pins_read_only())
    if attrib != cudaDevAttrHostRegisterSupported:
        raise CUDARuntimeError(1)
    return 1


def deviceSynchronize() -> None:
    _queues.wait_device(getDevice())


def deviceCanAccessPeer(device: int, peerDevice: int) -> int:
    return int(_fake.can_access_peer(device, peerDevice))


# ------------------------------------------------------------------------------------- memory


def free(ptr: int) -> None:
    """Free memory after waiting for the device, as the real function does."""
    if ptr:
        found = _fake.find(ptr)
        _queues.wait_device(found.device if found else getDevice())
        _fake.free(ptr)


def memGetInfo() -> tuple[int, int]:
    """Return free and total bytes of the current device; only this process counts."""
    total = fake_devices.memory_bytes()
    return total - _fake.used(getDevice()), total


def hostAlloc(size: int, flags: int) -> int:
    _fake.enter()
    if size == 0:
        return 0
    address = _fake.map_memory(size)
    _fake.host_memory[address] = size
    return address


def freeHost(ptr: int) -> None:
    for device in range(getDeviceCount()):
        _queues.wait_device(device)
    if ptr and ptr not in _fake.host_memory:
        raise CUDARuntimeError(1)
    if ptr:
        _fake.unmap_memory(ptr, _fake.host_memory.pop(ptr))


def hostUnregister(ptr: int) -> None:
    """While a copy is under way the device would lose sight of the memory."""
    if ptr in _fake.pinned and _queues.under_way(ptr, _fake.pinned[ptr][0]):
        raise _fake.lose()
    _fake.unpin(ptr)


def pointerGetAttributes(ptr: int) -> PointerAttributes:
    _fake.enter()
    found = _fake.find(ptr)
    if found is not None:
        return PointerAttributes(found.device, ptr, 0, memoryTypeDevice)
    host = [*_fake.host_memory.items(), *((a, n) for a, (n, _) in _fake.pinned.items())]
    if any(a <= ptr < a + n for a, n in host):
        return PointerAttributes(getDevice(), ptr, ptr, memoryTypeHost)
    return PointerAttributes(-2, 0, 0, memoryTypeUnregistered)


# ------------------------------------------------------------------------------------- copies


def memcpy(dst: int, src: int, size: int, kind: int) -> None:
    """On the default stream. The host waits, unless both are device memory."""
    queue = _queues.get(0)
    order = _queues.add_copy(queue, dst, src, size, kind)
    if not (_fake.find(dst) and _fake.find(src)):
        queue.wait(order)


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    _queues.add_copy(_queues.get(stream), dst, src, size, kind)


def memcpyPeer(dst: int, dstDevice: int, src: int, srcDevice: int, size: int) -> None:
    """Waits for both devices. Works without peer access: the driver takes another way then."""
    for device in (dstDevice, srcDevice):
        _fake.check_device(device)
        _queues.wait_device(device)
    memcpyPeerAsync(dst, dstDevice, src, srcDevice, size, 0)
    _queues.get(0).wait()


def memcpyPeerAsync(
    dst: int, dstDevice: int, src: int, srcDevice: int, size: int, stream: int
) -> None:
    for pointer, device in ((dst, dstDevice), (src, srcDevice)):
        _fake.check_device(device)
        found = _fake.find(pointer)
        if size and (found is None or found.device != device):
            raise CUDARuntimeError(1)
    _queues.add_copy(_queues.get(stream), dst, src, size, memcpyDeviceToDevice)


# ------------------------------------------------------------------------------------ streams


def streamCreateWithFlags(flags: int) -> int:
    return _queues.create(blocking=flags != streamNonBlocking).number


def streamDestroy(stream: int) -> None:
    _queues.destroy(_queues.get(stream).number)


def streamSynchronize(stream: int) -> None:
    _queues.get(stream).wait()
