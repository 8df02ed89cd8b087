"""Cache of ModelInferRequest heads, by their bytes, with the results of reading and checking.

Many requests of a client differ only in their tensors. The cache keeps messages whose last field
is their only tensor, without an id and without client memory.

An entry is valid while the signature of the model version stays the same.
"""

from collections.abc import Callable
from typing import Any

from msgspec import Struct

from shmserve.frontends.grpc.request_mapping import checked_version
from shmserve.frontends.grpc.tensor_message import PlacedTensor, TensorMessage
from shmserve.protocol.oip.checked_request import CheckedRequest
from shmserve.protocol.protobuf.infer_wire import WireInferRequest, WireInput
from shmserve.protocol.protobuf.wire import Walk

_MAX_KNOWN = 256
_LONGEST = 4096  # bytes; reading a longer message costs little more than the cache
_BEGINNING = 32  # first bytes of a message, which together with the length are the message's key
_RAW = 0x3A

Key = bytes | tuple[int, bytes]


class KnownMessage(Struct, frozen=True, eq=False):
    """A message that fits its model, without the bytes of its tensor.

    Attributes:
        before: all bytes before the tensor; empty if the tensor was received into a slot, apart
            from the other fields.
        wire: the decoded message, without the tensor.
        version: checked version of the model; empty if the message names none.
        fitting: the request as checked against its model.
    """

    before: bytes
    wire: WireInferRequest
    version: str
    fitting: CheckedRequest
    empty_final: bool


class RecalledMessage(Struct, frozen=True, eq=False):
    """A cache entry together with the tensor of a new message."""

    known: KnownMessage
    inputs: tuple[WireInput, ...]


class KnownMessages:
    """The known messages of one process, for any thread. `announced`: returns the entry for a
    message from the bytes before its tensor, or None."""

    def __init__(self) -> None:
        self._known: dict[Key, KnownMessage] = {}
        self.announced: Callable[[bytes], KnownMessage | None] = self._known.get

    def find(self, data: bytes | memoryview | TensorMessage) -> RecalledMessage | None:
        """Return the entry for a message together with the message's tensor, or None."""
        place: Any = None
        if type(data) is bytes:
            entry = self._known.get((len(data), data[:_BEGINNING]))
            if entry is None or not data.startswith(entry.before):
                return None
            raw = memoryview(data)[len(entry.before) :]
        else:
            if not isinstance(data, TensorMessage) or len(data.raw) != 1:
                return None
            entry, place = self._known.get(bytes(data.fields)), data.raw[0]
            if entry is None or not isinstance(place, PlacedTensor):
                return None
            if entry.fitting.inputs[0].nbytes != len(place.view):
                return None
            raw = place.view
        (old,) = entry.wire.inputs
        new = WireInput(old.name, old.datatype, old.shape, old.parameters, None, raw, place)
        return RecalledMessage(entry, (new,))

    def keep(
        self,
        data: bytes | memoryview | TensorMessage,
        wire: WireInferRequest,
        fitting: CheckedRequest,
        empty_final: bool,
    ) -> None:
        """Keep a message, if equal messages may come again. Arguments other than `data` as in
        `KnownMessage`."""
        if wire.id or len(fitting.inputs) != 1 or wire.raw_count != 1 or fitting.in_regions:
            return
        if wire.inputs[0].contents is not None:
            return
        key: Key
        if type(data) is bytes:
            before = kept = _before_tensor(data)
            key = len(data), data[:_BEGINNING]
        else:
            before, kept = b"", _before_place(data)
            key = kept
        if not 0 < len(kept) <= _LONGEST:
            return
        # The entry must keep neither the tensor nor the memory of the received message
        (old,) = wire.inputs
        bare = WireInput(old.name, old.datatype, old.shape, old.parameters, None, None)
        wire = WireInferRequest(
            wire.model_name, wire.model_version, "", wire.parameters, (bare,), wire.outputs, 1
        )
        version = checked_version(wire.model_version) if wire.model_version else ""
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known[key] = KnownMessage(before, wire, version, fitting, empty_final)


def _before_place(data: object) -> bytes:
    """Return the fields of a message whose only tensor is in a slot; empty for other messages."""
    if isinstance(data, TensorMessage) and len(data.raw) == 1:
        return bytes(data.fields) if isinstance(data.raw[0], PlacedTensor) else b""
    return b""


def _before_tensor(data: bytes) -> bytes:
    """Return the bytes before a tensor that is the last field; empty if another field is last."""
    tag = start = stop = 0
    for tag, start, stop in Walk(data).fields(0, len(data)):  # noqa: B007
        pass
    if tag != _RAW or stop != len(data):
        return b""
    return data[:start]
