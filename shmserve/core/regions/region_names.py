"""Names chosen by clients, for regions and objects, and arguments that register GPU memory."""

from shmserve.core.caller import Caller
from shmserve.core.region_kinds import CUDA
from shmserve.core.registry import Region
from shmserve.errors import InvalidArgument

MAX_NAME = 255  # bytes of a region's or an object's name
# The server's own segments, which have a name for a moment; segments of Triton's Python models
_RESERVED = ("shmserve.", "triton_python_backend_shm_region_")
HANDLE_BYTES = 64  # size of a cudaIpcMemHandle_t
_MAX_SIZE = (1 << 63) - 1


def check_name(name: str, kind: str = "system") -> None:
    """Check that a name can stand in a path and in a log line. `kind`: for Triton's wording."""
    if not name:
        raise InvalidArgument(f"'region name' is necessary to register {kind} shared memory region")
    if "/" in name or any(ord(c) < 32 or ord(c) == 127 for c in name):
        raise InvalidArgument("the name of a shared memory region has forbidden characters")
    if _encoded_size(name) > MAX_NAME:
        raise InvalidArgument(f"the name of a shared memory region is over {MAX_NAME} bytes long")


def object_name(key: str, region: str) -> str:
    """Return the object's plain file name. A key may begin with any number of slashes. Raise
    InvalidArgument if the key is no valid file name, or has a reserved prefix."""
    name = key.lstrip("/")
    bad = name in ("", ".", "..") or "/" in name or "\0" in name or _encoded_size(name) > MAX_NAME
    if bad:
        raise InvalidArgument(f"cannot register shared memory region '{region}' - invalid shm key")
    for prefix in _RESERVED:
        if name.startswith(prefix):
            raise InvalidArgument(
                f"cannot register shared memory region '{region}' as the key contains the"
                f" reserved prefix '{prefix}'"
            )
    return name


def _encoded_size(text: str) -> int:
    """Return the size as UTF-8, in bytes; more than `MAX_NAME` if the text cannot be encoded."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return MAX_NAME + 1


def check_cuda_arguments(name: str, handle: bytes, device_id: int, byte_size: int) -> None:
    """Check the arguments that need no knowledge of the server's devices."""
    check_name(name, CUDA)
    if len(handle) != HANDLE_BYTES:
        text = f"raw_handle has {len(handle)} bytes, a cudaIpcMemHandle_t has {HANDLE_BYTES}"
        raise refusal(name, text)
    if device_id < 0:
        raise refusal(name, f"device_id {device_id} is negative")
    if not 0 < byte_size <= _MAX_SIZE:
        raise refusal(name, f"byte_size {byte_size}")


def cuda_region(
    caller: Caller, name: str, handle: bytes, device_id: int, byte_size: int, devices: int
) -> Region:
    """Return the region to enter (`RegionBook.enter`). `devices`: number of devices that the server
    sees. Raise InvalidArgument with the name of a wrong argument."""
    check_cuda_arguments(name, handle, device_id, byte_size)
    if not devices:
        raise InvalidArgument(
            f"failed to register CUDA shared memory region: '{name}', GPUs not supported"
        )
    if device_id >= devices:
        raise refusal(name, f"device_id {device_id}, but the number of devices is {devices}")
    return Region(
        name, 0, "", 0, byte_size, caller.uid, caller.pid, caller.started,
        kind=CUDA, device_id=device_id, handle=handle,
    )  # fmt: skip


def check_allocation(region: Region, nbytes: int) -> None:
    """Check a region against the size of the allocation behind its handle. Raise InvalidArgument if
    the allocation is smaller."""
    if nbytes < region.byte_size:
        text = f"byte_size {region.byte_size}, but the allocation has {nbytes} bytes"
        raise refusal(region.name, text)


def refusal(name: str, why: str) -> InvalidArgument:
    """Return the error for invalid arguments."""
    return InvalidArgument(f"failed to register shared memory region '{name}': invalid args: {why}")
