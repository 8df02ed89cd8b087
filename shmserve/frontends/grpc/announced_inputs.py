"""What the head of a ModelInferRequest says of the tensors behind it.

The official clients write fields in the order of their numbers, raw_input_contents last. So all
that a request is checked for is known before its first tensor, and before there is memory for it.
"""

from __future__ import annotations

from contextlib import suppress
from math import prod

from msgspec.structs import replace

from shmserve.config import Settings
from shmserve.core.registry import ModelEntry
from shmserve.dispatch.caller_shares import FREE, CallerShare
from shmserve.errors import ShmserveError
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.grpc.request_mapping import announced_request, checked_version
from shmserve.frontends.inference import signature_of
from shmserve.protocol.oip.request import InferRequest
from shmserve.protocol.oip.validation import check_inputs, refuse_decoupled
from shmserve.protocol.protobuf.infer_wire import WireInferRequest, parse_request
from shmserve.tensor.dtypes import DATATYPES

_MODEL_NAME = 0x0A  # the tag of ModelInferRequest.model_name


class AnnouncedInputs:
    """Of one request, which fits its model as far as it is known.

    Args:
        caller_number: whose share of the pool they take of.
        known_nbytes: they fit, and with so many bytes for the only tensor.

    Attributes:
        share: what the caller has of the pool for them; None: nothing that counts, or somebody
            else has taken that over.
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
        """Whether the raw_input_contents of this index may have so many bytes; False: the head
        does not tell whose it is.

        Raises:
            ShmserveError: they may not.
        """
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
        """Nobody wants them, or their share is somebody else's. Idempotent."""
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
    """What comes after these first bytes of a message; None: they do not tell. The number: as
    `AnnouncedInputs` has it.

    Raises:
        ShmserveError: the model is not there or not ready, or the request does not fit it.
    """
    wire = parse_request(head, limits)
    if not wire.model_name:
        return None
    entry = ready_entry(wire, dispatcher)
    if not wire.inputs or any(source.contents is not None for source in wire.inputs):
        return None
    return AnnouncedInputs(
        dispatcher, entry, announced_request(wire, _nbytes), limits, caller_number
    )


def ready_entry(wire: WireInferRequest, dispatcher: DispatchApi) -> ModelEntry:
    """The model version a request is for.

    Raises:
        ShmserveError: there is none, or it cannot be used now.
    """
    version = wire.model_version
    return dispatcher.ready_model(wire.model_name, checked_version(version) if version else "")


def _nbytes(datatype: str, shape: tuple[int, ...]) -> int:
    """Of a tensor, where these two tell."""
    known = DATATYPES.get(datatype)
    return prod(shape) * known.itemsize if known is not None else 0


class ModelSubjects:
    """The models that requests are for, as `RpcSubjects` says."""

    def __init__(self, dispatcher: DispatchApi) -> None:
        self._dispatcher = dispatcher

    def of(self, message: memoryview) -> bytes:
        """The model's name, if it comes first, as all libraries have it, and is shorter than 128
        bytes."""
        if len(message) > 1 and message[0] == _MODEL_NAME and message[1] < 128:
            return bytes(message[2 : 2 + message[1]])
        return b""

    def refused(self, subject: bytes, error: ShmserveError) -> None:
        """A request for this model was refused before it was read: it is counted."""
        with suppress(ShmserveError, UnicodeDecodeError):  # it is no model's
            self._dispatcher.refused(self._dispatcher.ready_model(subject.decode()), error)
