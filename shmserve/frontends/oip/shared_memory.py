"""Shared-memory extension without a transport: status, register, unregister, look up.

Every frontend answers status and look-ups from the published registry. Only register and
unregister go to the coordinator. `core.regions.region_book` decides about callers' rights.
"""

import base64
import binascii
import os
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from shmserve.config import Settings
from shmserve.core.caller import Caller
from shmserve.core.region_kinds import CUDA, KINDS, SYSTEM
from shmserve.core.regions import region_book as rules
from shmserve.core.regions.region_names import (
    HANDLE_BYTES,
    check_cuda_arguments,
    check_name,
    object_name,
)
from shmserve.core.registry import Region
from shmserve.errors import InvalidArgument, NotFound, Unimplemented
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.protocol.control.data_messages import RegionRef
from shmserve.protocol.oip.json_request import MAX_INT64
from shmserve.protocol.oip.request import RegionWindow
from shmserve.protocol.oip.strict_parser import uint
from shmserve.tensor.spec import ModelSpec

OFF = (
    "Client shared memory is disabled. Set client_shm_mode to map or copy"
    " (SHMSERVE_CLIENT_SHM_MODE) to enable."
)


class RegionStatus(Struct, frozen=True):
    """A system region in a status answer."""

    name: str
    key: str
    offset: int
    byte_size: int


class CudaStatus(Struct, frozen=True):
    """A CUDA region in a status answer."""

    name: str
    device_id: int
    byte_size: int


class SharedMemory:
    """Regions of clients, as one frontend process serves them. A process has a single object."""

    def __init__(self, dispatcher: DispatchApi, settings: Settings) -> None:
        self._dispatcher = dispatcher
        self._settings = settings
        self._server_uid = os.geteuid()
        self._off = settings.client_shm_mode == "off"

    def status(self, caller: Caller, name: str = "") -> list[RegionStatus]:
        """Return the caller's system regions, or only the region `name`. Raise NotFound if the
        caller has no such system region."""
        own = self._own(caller, SYSTEM, name)
        return [RegionStatus(r.name, r.key, r.offset, r.byte_size) for r in own]

    def cuda_status(self, caller: Caller, name: str = "") -> list[CudaStatus]:
        """Return the caller's CUDA regions, or only the region `name`. Raise NotFound if the caller
        has no such CUDA region."""
        own = self._own(caller, CUDA, name)
        return [CudaStatus(r.name, r.device_id, r.byte_size) for r in own]

    def _own(self, caller: Caller, kind: str, name: str) -> list[Region]:
        regions = self._dispatcher.snapshot().regions
        caller = rules.acting(caller, self._server_uid)
        own = rules.visible(regions, caller, self._settings, self._server_uid)
        named = [r for r in own if not name or r.name == name]
        matches = [r for r in named if r.memory.family == kind]
        if name and named and not matches:
            raise NotFound(
                f"The region named '{name}' is registered as {named[0].memory.called} shared"
                f" memory, not {KINDS[kind].called} shared memory"
            )
        if name and not matches:
            raise NotFound(f"Unable to find {kind} shared memory region: '{name}'")
        return matches

    def require_on(self) -> None:
        """Raise Unimplemented if client shared memory is off."""
        if self._off:
            raise Unimplemented(OFF)

    def register(self, caller: Caller, name: str, key: str, offset: int, byte_size: int) -> None:
        """Register a part of a shared-memory object. Raise ShmserveError if that was refused."""
        self.require_on()
        object_name(key, name)
        check_name(name)
        if not byte_size:
            raise InvalidArgument(
                f"failed to register shared memory region '{name}': unable to process address"
                " space: byte_size is 0"
            )
        if not 0 < byte_size <= MAX_INT64 or not 0 <= offset <= MAX_INT64 - byte_size:
            raise InvalidArgument(f"failed to register shared memory region '{name}': invalid args")
        caller = rules.acting(caller, self._server_uid)
        self._dispatcher.coordinator.register_region(caller, name, key, offset, byte_size)

    def register_cuda(
        self, caller: Caller, name: str, handle: bytes, device_id: int, byte_size: int
    ) -> None:
        """Register GPU memory. Raise ShmserveError if the registration was refused."""
        self.require_on()
        check_cuda_arguments(name, handle, device_id, byte_size)
        self._dispatcher.coordinator.register_cuda_region(
            rules.acting(caller, self._server_uid), name, handle, device_id, byte_size
        )

    def unregister(self, caller: Caller, name: str = "", kind: str = SYSTEM) -> None:
        """Remove the region `name` of the caller, or all the caller's regions of a kind. Raise
        Unimplemented if client shared memory is off."""
        self.require_on()
        caller = rules.acting(caller, self._server_uid)
        self._dispatcher.coordinator.unregister_regions(caller, name, kind)

    def as_of(self, caller: Caller) -> object:
        """Return a stamp. While the stamp stays equal, `find` gives equal results for equal
        windows and model versions."""
        snapshot, uid = self._dispatcher.snapshot(), self._server_uid
        owner = rules.region_key(rules.acting(caller, uid), "", self._settings, uid)
        return snapshot.epoch, snapshot.generation, owner

    def find(
        self, caller: Callable[[], Caller], spec: ModelSpec, window: RegionWindow
    ) -> RegionRef:
        """Return the reference by which executors find a window of a region. A window of zero
        bytes may lie anywhere within the region. Raise NotFound if the caller has no such region,
        InvalidArgument if the window reaches outside, or the model takes no client memory."""
        if spec.parameters.get("client_shm_mode") == "off":
            raise InvalidArgument(f"model '{spec.name}' takes no client shared memory")
        region = rules.find(
            self._dispatcher.snapshot().regions,
            rules.acting(caller(), self._server_uid),
            window.region,
            window.offset,
            window.nbytes,
            self._settings,
            self._server_uid,
        )
        return RegionRef(region.number, window.offset, window.nbytes)


def parse_system(document: Any) -> tuple[str, int, int]:
    """Return key, offset and byte_size from the JSON of a request to register shared memory. Raise
    InvalidArgument if a field is missing or of another type."""
    fields = _fields(document, "key", "byte_size")
    key = fields["key"]
    if not isinstance(key, str):
        raise InvalidArgument("'key' must be a string")
    return key, uint(fields.get("offset", 0), "'offset'"), uint(fields["byte_size"], "'byte_size'")


def parse_cuda(document: Any) -> tuple[bytes, int, int]:
    """Return handle, device_id and byte_size from the JSON of a request to register GPU memory.
    Raise InvalidArgument if a field is missing or of another type, or the handle is not base64 of a
    handle's length."""
    fields = _fields(document, "raw_handle", "device_id", "byte_size")
    encoded = _fields(fields["raw_handle"], "b64")["b64"]
    try:
        raw = base64.b64decode(encoded, validate=True) if isinstance(encoded, str) else b""
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != HANDLE_BYTES:
        raise InvalidArgument("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
    return raw, uint(fields["device_id"], "'device_id'"), uint(fields["byte_size"], "'byte_size'")


def _fields(document: Any, *needed: str) -> dict[str, Any]:
    fields = document if isinstance(document, dict) else {}
    for field in needed:
        if field not in fields:
            raise InvalidArgument(f"Shared memory register request has no '{field}' field")
    return fields
