"""A ModelInferRequest whose tensors are received straight into slots.

The official clients write fields in the order of their numbers, with raw_input_contents last. So
all checked parts of a request arrive before the first tensor, and before memory is reserved.

Before the first slot is reserved, the head of the message (all bytes before the tensors) is
checked like a whole message: caller, model, inputs. A message gets no slots if the tensors come
first, since such a head tells nothing about the tensors. Messages without slots are counted on the
heap (`message_heap`), received into one buffer and copied once. Streams, compressed messages and
typed contents never get slots. Slots belong to the message until the inference takes the slots.
"""

from collections.abc import Callable
from contextlib import suppress
from math import prod
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from shmserve.config import Settings
from shmserve.core.memory.slots import Slot
from shmserve.core.registry import ModelEntry
from shmserve.dispatch.caller_shares import FREE, CallerShare
from shmserve.errors import ShmserveError
from shmserve.frontends.dispatch_api import DispatchApi, TensorMemory
from shmserve.frontends.grpc.message_heap import MessageHeap, failed, take
from shmserve.frontends.grpc.request_mapping import announced_request, checked_version
from shmserve.frontends.heap_budget import FREE as FREE_HEAP
from shmserve.frontends.http2.grpc_framing import GrpcMessage
from shmserve.frontends.inference import signature_of
from shmserve.protocol.oip.request import InferRequest
from shmserve.protocol.oip.validation import check_inputs, refuse_decoupled
from shmserve.protocol.protobuf.incoming_request import IncomingRequest
from shmserve.protocol.protobuf.infer_wire import WireInferRequest, parse_request
from shmserve.tensor.dtypes import DATATYPES

_MODEL_NAME = 0x0A  # the tag of ModelInferRequest.model_name


class AnnouncedInputs:
    """Inputs that the head of one request announces, checked against the model as far as known.

    Args:
        caller_number: number of the caller whose share of the pool the inputs take.
        known_nbytes: bytes of the only tensor, if the request is known to fit its model; else
            negative.

    Attributes:
        share: the caller's share of the pool, held for the inputs; None if the inputs are too
            small to count, or if the inference has taken the share over.
    """

    def __init__(
        self,
        dispatcher: DispatchApi,
        entry: ModelEntry,
        request: InferRequest,
        limits: Settings,
        caller_number: int,
        known_nbytes: int = -1,
    ) -> None:
        self._caller_number = caller_number
        self._nbytes = 0
        self.share: CallerShare | None = None
        self._dispatcher = dispatcher
        self._entry = entry
        self._request = request
        self._limits = limits
        self._raw = [i for i, source in enumerate(request.inputs) if source.region is None]
        self._known_nbytes = known_nbytes
        if known_nbytes < 0:
            self._check(request)

    def fits(self, index: int, nbytes: int) -> bool:
        """Return True if the raw_input_contents of this index may have `nbytes` bytes. Return False
        if the head announces no such tensor. Raise ShmserveError if the tensor must not have
        `nbytes` bytes."""
        if index >= len(self._raw):
            return False
        if nbytes != self._known_nbytes:
            self._check_one(self._raw[index], nbytes)
        self._nbytes += nbytes
        if self._nbytes > FREE:
            self._hold()
        return True

    def _check_one(self, place: int, nbytes: int) -> None:
        source = self._request.inputs[place]
        if source.binary_size != nbytes and DATATYPES[source.datatype].itemsize:
            inputs = list(self._request.inputs)
            inputs[place] = replace(source, binary_size=nbytes)
            self._check(replace(self._request, inputs=tuple(inputs)))

    def _hold(self) -> None:
        if self.share is None:
            self.share = self._dispatcher.shares.of(self._caller_number)
        try:
            self.share.hold(self._nbytes)
        except ShmserveError as ex:
            self._dispatcher.refused(self._entry, ex)
            raise

    def close(self) -> None:
        """Give back the share, unless the inference has taken the share over. Idempotent."""
        if self.share is not None:
            self.share.close()

    def _check(self, request: InferRequest) -> None:
        try:
            signature = signature_of(self._entry.spec)
            refuse_decoupled(signature, "ModelInfer RPC")
            check_inputs(signature, request, self._limits, None)
        except ShmserveError as ex:
            self._dispatcher.refused(self._entry, ex)
            raise


def announced_inputs(
    head: memoryview, dispatcher: DispatchApi, limits: Settings, caller_number: int
) -> AnnouncedInputs | None:
    """Return the inputs that the head of a message announces, None if the head does not tell.
    `caller_number`: as in `AnnouncedInputs`. Raise ShmserveError if the model does not exist or is
    not ready, or the request does not fit."""
    wire = parse_request(head)
    if not wire.model_name:
        return None
    entry = ready_entry(wire, dispatcher)
    if not wire.inputs or any(source.contents is not None for source in wire.inputs):
        return None
    return AnnouncedInputs(
        dispatcher, entry, announced_request(wire, _nbytes), limits, caller_number
    )


def ready_entry(wire: WireInferRequest, dispatcher: DispatchApi) -> ModelEntry:
    """Return the model version of a request. Raise ShmserveError if the model version does not
    exist or cannot be used now."""
    version = wire.model_version
    return dispatcher.ready_model(wire.model_name, checked_version(version) if version else "")


def _nbytes(datatype: str, shape: tuple[int, ...]) -> int:
    """Return the size of a tensor in bytes; 0 if datatype and shape do not determine the size."""
    dtype = DATATYPES.get(datatype)
    return prod(shape) * dtype.itemsize if dtype is not None else 0


class ModelSubjects:
    """Models of calls, for `RpcMethod.subjects`."""

    def __init__(self, dispatcher: DispatchApi) -> None:
        self._dispatcher = dispatcher

    def of(self, message: memoryview) -> bytes:
        """Return the model's name if the name comes first (all client libraries write so) and is
        shorter than 128 bytes; else return an empty name."""
        if len(message) > 1 and message[0] == _MODEL_NAME and message[1] < 128:
            return bytes(message[2 : 2 + message[1]])
        return b""

    def refused(self, subject: bytes, error: ShmserveError) -> None:
        """Count a request for this model that was refused before being read."""
        with suppress(ShmserveError, UnicodeDecodeError):  # the subject is no model's name
            self._dispatcher.refused(self._dispatcher.ready_model(subject.decode()), error)


class PlacedTensor(Struct, eq=False):
    """A slot that a tensor is received into. `view`: memory of the slot. `slot`: the slot, None
    once taken or given back. `memory`: takes the slot back."""

    view: memoryview
    slot: Slot | None
    memory: TensorMemory

    def take(self) -> Slot:
        slot, self.slot = self.slot, None
        assert slot is not None, "a slot is taken once"
        return slot

    def close(self) -> None:
        """Give the slot back, unless taken."""
        if self.slot is not None:
            self.memory.reclaim(self.take())


class TensorIntake(Struct, frozen=True, eq=False):
    """Reception of the tensors in an rpc's messages. `memory`: source of the slots. `announced`:
    returns the inputs that the head of a message announces, if any. Raises the error that refuses
    the message."""

    memory: TensorMemory
    announced: Callable[[memoryview, Any], AnnouncedInputs | None]


class TensorMessage(IncomingRequest):
    """Receiver of one message, and then that message. Owns its slots until the inference takes
    them.

    A tensor gets a slot only if the head of the message says that the tensor fits the model. All
    other fields are gathered on the heap.

    Args:
        size: bytes of the message.
        limits: limits of a request.
        intake: how tensors are received.
        context: the message's call.

    Attributes:
        announced: inputs that the head announces, once the head was checked.
        fields: all fields but the tensors, once the message is complete.

    Raises:
        FramingFailed: raised by all methods that take bytes, if the message is refused.
    """

    __slots__ = (
        "_asked", "_closed", "_context", "_heap", "_intake", "_looked", "_memory",
        "_placed_tensors", "announced", "fields",
    )  # fmt: skip

    def __init__(
        self, size: int, limits: Settings, intake: TensorIntake, context: Any, sparing: bool
    ) -> None:
        super().__init__(size, limits, sparing=sparing, free_bytes=FREE_HEAP)
        self._intake = intake
        self._memory = intake.memory
        self._context = context
        self.announced: AnnouncedInputs | None = None
        self._looked = False
        self._heap: MessageHeap | None = None  # set once the message exceeds the uncounted bytes
        self._placed_tensors: list[PlacedTensor] = []
        self._closed = False
        self._asked = False  # True while another thread makes the needed slot
        self.fields = memoryview(b"")

    def expected(self, size: int, head: memoryview) -> bool:
        try:
            if not self._looked:
                self._looked = True
                self.announced = self._intake.announced(head, self._context)
            announced = self.announced
            return announced is not None and announced.fits(len(self.raw), size)
        except ShmserveError as ex:
            raise failed(ex) from None

    def keep(self, count: int) -> None:
        if self._heap is None:
            self._heap = MessageHeap(self._limits.max_heap_bytes)
            count = self.gathered
        take(self._heap, count)

    def placed(self, nbytes: int) -> PlacedTensor | None:
        slot = self._memory.reserve_now(nbytes)
        if slot is None:
            return None
        placed = PlacedTensor(slot.view, slot, self._memory)
        self._placed_tensors.append(placed)
        return placed

    def ask(self) -> bool:
        """Return True once for each slot that the message needs: the caller of this method must
        then provide the slot."""
        already_asked, self._asked = self._asked, True
        return not already_asked

    def grow(self) -> Slot | None:
        """Return the needed slot, or None without memory. Waits like `TensorMemory.reserve`, so
        never on the loop."""
        try:
            return self._memory.reserve(self.wanted)
        except ShmserveError:
            return None

    def grown(self, slot: Slot | None) -> None:
        """Use the slot that `grow` returned; None: receive the tensor on the heap."""
        self._asked = False
        placed = None
        if slot is not None:
            placed = PlacedTensor(slot.view, slot, self._memory)
            self._placed_tensors.append(placed)
        if self._closed:
            self.close()
        else:
            self.grant(placed)

    def message(self, compressed: bool) -> GrpcMessage | None:
        if self.wanted:
            return None
        self.fields = self.rest()
        return GrpcMessage(compressed, self.fields, self)

    def close(self) -> None:
        """Give back all memory that the inference has not taken. Idempotent."""
        self._closed = True
        if self._heap is not None:
            self._heap.close()
        if self.announced is not None:
            self.announced.close()
        for placed in self._placed_tensors:
            if placed.slot is not None:
                placed.close()
