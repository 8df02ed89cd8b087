"""The shared-memory extension without a transport: status, register, unregister, look up.

Every frontend answers status and look-ups from the published registry; only register and
unregister go to the coordinator. What a caller may do is `core.regions`' business.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from shmserve.config import Settings
from shmserve.core.regions.cuda_allocation import HANDLE_BYTES, check_arguments
from shmserve.core.regions.region_book import Caller
from shmserve.core.regions import region_book as rules
from shmserve.core.regions.region_names import check_name, object_name
from shmserve.core.registry import CUDA, SYSTEM, Region
from shmserve.errors import InvalidArgument, NotFound, Unimplemented
from shmserve.frontends.oip.seam import Dispatcher
from shmserve.protocol.control.data_messages import RegionRef
from shmserve.protocol.oip.request import MAX_INT64, RegionWindow
from shmserve.protocol.oip.strict_parser import uint
from shmserve.tensor.spec import ModelSpec

OFF = (
    "Client shared memory is disabled. Set client_shm_mode to map or copy"
    " (SHMSERVE_CLIENT_SHM_MODE) to enable."
)
_CALLED = {SYSTEM: "system", CUDA: "CUDA"}  # in errors


class RegionStatus(Struct, frozen=True):
    """One system region in a status answer."""

    name: str
    key: str
    offset: int
    byte_size: int


class CudaStatus(Struct, frozen=True):
    """One CUDA region in a status answer."""

    name: str
    device_id: int
    byte_size: int


class Regions:
    """See the module. One per process."""

    def __init__(self, dispatcher: Dispatcher, settings: Settings) -> None:
        self._dispatcher = dispatcher
        self._settings = settings
        self._server_uid = os.geteuid()
        self._off = settings.client_shm_mode == "off"

    def status(self, caller: Caller, name: str = "") -> list[RegionStatus]:
        """The caller's system regions, or one of them.

        Raises:
            NotFound: it has none of that name.
        """
        found = self._own(caller, SYSTEM, name)
        return [RegionStatus(r.name, r.key, r.offset, r.byte_size) for r in found]

    def cuda_status(self, caller: Caller, name: str = "") -> list[CudaStatus]:
        """As `status`, of CUDA regions."""
        found = self._own(caller, CUDA, name)
        return [CudaStatus(r.name, r.device_id, r.byte_size) for r in found]

    def _own(self, caller: Caller, kind: str, name: str) -> list[Region]:
        all_of_them = self._dispatcher.snapshot().regions
        own = rules.visible(all_of_them, caller, self._settings, self._server_uid)
        named = [r for r in own if not name or r.name == name]
        found = [r for r in named if r.kind == kind]
        if name and named and not found:
            raise NotFound(
                f"The region named '{name}' is registered as {_CALLED[named[0].kind]} shared"
                f" memory, not {_CALLED[kind]} shared memory"
            )
        if name and not found:
            raise NotFound(f"Unable to find {kind} shared memory region: '{name}'")
        return found

    def register(self, caller: Caller, name: str, document: Any) -> None:
        """Register a region from a request's body, already parsed.

        Raises:
            ShmserveError: it was refused.
        """
        if self._off:
            raise Unimplemented(OFF)
        fields = document if isinstance(document, dict) else {}
        for field in ("key", "byte_size"):
            if field not in fields:
                raise InvalidArgument(f"Shared memory register request has no '{field}' field")
        key = fields["key"]
        if not isinstance(key, str):
            raise InvalidArgument("'key' must be a string")
        offset, byte_size = (
            uint(fields.get("offset", 0), "'offset'"),
            uint(fields["byte_size"], "'byte_size'"),
        )
        check_name(name)
        object_name(key, name)
        if offset + byte_size > MAX_INT64 or byte_size == 0:
            raise InvalidArgument(f"failed to register shared memory region '{name}': invalid args")
        self._dispatcher.regions.register(caller, name, key, offset, byte_size)

    def register_cuda(
        self, caller: Caller, name: str, handle: bytes, device_id: int, byte_size: int
    ) -> None:
        """Register GPU memory.

        Raises:
            ShmserveError: it was refused.
        """
        if self._off:
            raise Unimplemented(OFF)
        check_arguments(name, handle, device_id, byte_size)
        self._dispatcher.regions.register_cuda(caller, name, handle, device_id, byte_size)

    def unregister(self, caller: Caller, name: str = "", kind: str = SYSTEM) -> None:
        """Remove one of the caller's regions of a kind, or all of them.

        Raises:
            Unimplemented: client shared memory is off.
        """
        if self._off:
            raise Unimplemented(OFF)
        self._dispatcher.regions.unregister(caller, name, kind)

    def find(
        self, caller: Callable[[], Caller], spec: ModelSpec, window: RegionWindow
    ) -> RegionRef:
        """A window of a region as executors know it. Zero bytes lie anywhere within.

        Raises:
            NotFound: the caller has no such region.
            InvalidArgument: the window reaches outside, or the model takes no client memory.
        """
        if spec.parameters.get("client_shm_mode") == "off":
            raise InvalidArgument(f"model '{spec.name}' takes no client shared memory")
        region = rules.find(
            self._dispatcher.snapshot().regions,
            caller(),
            window.region,
            window.offset,
            window.nbytes,
            self._settings,
            self._server_uid,
        )
        return RegionRef(region.number, window.offset, window.nbytes)


def parse_cuda(document: Any) -> tuple[bytes, int, int]:
    """Handle, device_id and byte_size from the JSON of a request to register GPU memory.

    Raises:
        InvalidArgument: a field is missing or of another type, or the handle is not base64.
    """
    fields = document if isinstance(document, dict) else {}
    for field in ("raw_handle", "device_id", "byte_size"):
        if field not in fields:
            raise InvalidArgument(f"Shared memory register request has no '{field}' field")
    handle = fields["raw_handle"]
    if not isinstance(handle, dict) or "b64" not in handle:
        raise InvalidArgument("Shared memory register request has no 'b64' field")
    encoded = handle["b64"]
    try:
        raw = base64.b64decode(encoded, validate=True) if isinstance(encoded, str) else b""
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) != HANDLE_BYTES:
        raise InvalidArgument("'raw_handle' must be a valid base64 encoded cudaIpcMemHandle_t")
    device_id, byte_size = (
        uint(fields["device_id"], "'device_id'"),
        uint(fields["byte_size"], "'byte_size'"),
    )
    return raw, device_id, byte_size
