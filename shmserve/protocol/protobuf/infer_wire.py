"""ModelInferRequest and ModelInferResponse: bytes to values and back, tensors uncopied.

Generated protobuf classes copy every tensor once more than needed in each direction; for small
messages they would suffice. proto/grpc_service.proto defines the field numbers used here.

Raw contents are views of the received bytes. A response is joined from the slots' views in a
single pass. Measured on one machine (`python -m bench.wire`): 16 MiB take 0.1 ms to read and 8 ms
to write, with generated classes 20 to 39 and 33 ms; 64 B take 6 us to read and 5 us to write, with
generated classes 6 and 3 us. Property tests and 10,000 mutations compare this reader with the
generated classes. This reader may only be stricter.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from msgspec import Struct

from shmserve.errors import InvalidArgument
from shmserve.protocol import bounds
from shmserve.protocol.control.data_messages import Parameter
from shmserve.protocol.protobuf.incoming_request import Place
from shmserve.protocol.protobuf.infer_contents import Contents, Spans, collect
from shmserve.protocol.protobuf.infer_parameters import add_parameter, encode_parameters
from shmserve.protocol.protobuf.wire import Walk, encode_field, encode_varint, signed

REGION_PARAMETER = "shared_memory_region"
MAX_RESPONSE_BYTES = (1 << 31) - 1  # limit of a gRPC message
# bytes outside raw tensors; even with an element in every two bytes, reading takes only a few ms
QUICK_BYTES = 2 << 10
_QUICK_FIELDS = 64
_RAW = 0x3A
_OutputRow = tuple[str, str, tuple[int, ...]]  # name, datatype, shape
Part = bytes | memoryview
Raw = memoryview | Place


class WireInput(Struct, frozen=True):
    """An input as received. `check_data` checks that the input has data in exactly one form."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    parameters: dict[str, Parameter]
    contents: Contents | None
    raw: memoryview | None  # a part of the message
    place: Place | None = None  # the place of `raw`, if the tensor was received into a place


class WireOutput(Struct, frozen=True):
    """A requested output as received."""

    name: str
    parameters: dict[str, Parameter]


class WireInferRequest(Struct, frozen=True):
    """A request as received. `raw_count` is the number of raw_input_contents."""

    model_name: str
    model_version: str
    id: str
    parameters: dict[str, Parameter]
    inputs: tuple[WireInput, ...]
    outputs: tuple[WireOutput, ...]
    raw_count: int


def parse_request(data: bytes | memoryview, placed: Sequence[Raw] = ()) -> WireInferRequest:
    """Parse a ModelInferRequest. Raw and typed contents stay in `data`.

    Args:
        data: the message.
        placed: raw_input_contents received before the entries in `data`; see `incoming_request`.

    Raises:
        InvalidArgument: malformed data, a parameter without a value, more inputs, outputs or
            parameters than `bounds.MAX_INPUTS`, or more fields than `bounds.MAX_FIELDS`.
    """
    walk = Walk(data, bounds.MAX_FIELDS)
    limit = bounds.MAX_INPUTS
    model = version = request_id = ""
    parameters: dict[str, Parameter] = {}
    inputs: list[tuple[int, int]] = []
    outputs: list[WireOutput] = []
    raw: list[Raw] = list(placed)
    view = memoryview(data)
    for tag, start, stop in walk.fields(0, len(data)):
        if tag == _RAW:
            raw.append(view[start:stop])
            if len(raw) > limit:
                raise _too_many("raw_input_contents", limit)
        elif tag == 0x2A:
            inputs.append((start, stop))
            if len(inputs) > limit:
                raise _too_many("inputs", limit)
        elif tag == 0x32:
            outputs.append(_output(walk, start, stop, limit))
            if len(outputs) > limit:
                raise _too_many("outputs", limit)
        elif tag == 0x0A:
            model = walk.text(start, stop, "model_name")
        elif tag == 0x12:
            version = walk.text(start, stop, "model_version")
        elif tag == 0x1A:
            request_id = walk.text(start, stop, "id")
        elif tag == 0x22:
            add_parameter(walk, start, stop, parameters, limit)
    # Inputs come last, since the model's name and the raw parts may follow them in the message.
    unused = iter(raw)
    tensors = tuple([_input(walk, span, model, unused, limit) for span in inputs])
    return WireInferRequest(
        model, version, request_id, parameters, tensors, tuple(outputs), len(raw)
    )


def quick_to_read(data: bytes | memoryview) -> bool:
    """Return True if parsing a ModelInferRequest takes at most a few milliseconds. Such a message
    has few raw tensors and little else. The check itself is quick."""
    if len(data) <= QUICK_BYTES:
        return True
    other = len(data)
    try:
        for tag, start, stop in Walk(data, _QUICK_FIELDS).fields(0, len(data)):
            if tag == _RAW:
                other -= stop - start
    except InvalidArgument:  # malformed, or too many
        return False
    return other <= QUICK_BYTES


def check_data(request: WireInferRequest) -> None:
    """Check that each input has data in one form and that every raw_input_contents is used.

    `parse_request` leaves this check out, because an unknown model must be reported first.

    Raise InvalidArgument if an input has no data or data in two forms, or a raw_input_contents is
    unused.
    """
    model = request.model_name
    used = 0
    for source in request.inputs:
        if REGION_PARAMETER in source.parameters:
            if source.contents is not None:
                raise InvalidArgument(
                    "unexpected 'content' provided when using shared memory for input tensor"
                    f" '{source.name}' for model '{model}'"
                )
            continue
        used += 1
        if source.contents is not None:
            if request.raw_count:
                raise InvalidArgument(
                    "contents field must not be specified when using raw_input_contents for"
                    f" '{source.name}' for model '{model}'"
                )
        elif source.raw is None:
            raise InvalidArgument(
                f"unable to find data for input tensor '{source.name}' for model '{model}' in"
                " request."
            )
    if request.raw_count > used:
        raise InvalidArgument(
            f"raw_input_contents has {request.raw_count} entries, but only {used} inputs take"
            f" their data from it for model '{model}'"
        )


def _too_many(what: str, limit: int) -> InvalidArgument:
    return InvalidArgument(f"the request has more than {limit} {what}")


def _input(
    walk: Walk, span: tuple[int, int], model: str, unused: Iterable[Raw], limit: int
) -> WireInput:
    name = datatype = ""
    shape: list[int] = []
    parameters: dict[str, Parameter] = {}
    spans: Spans | None = None
    for tag, start, stop in walk.fields(*span):
        if tag == 0x0A:
            name = walk.text(start, stop, "inputs.name")
        elif tag == 0x12:
            datatype = walk.text(start, stop, "inputs.datatype")
        elif tag == 0x1A:
            shape += walk.int64s(start, stop)
        elif tag == 0x18:
            shape.append(signed(walk.varint(start)))
        elif tag == 0x22:
            add_parameter(walk, start, stop, parameters, limit)
        elif tag == 0x2A:
            spans = {} if spans is None else spans
            collect(walk, start, stop, spans)
    contents = None if spans is None else Contents(walk.data, spans, name, model)
    raw = None if REGION_PARAMETER in parameters else next(iter(unused), None)
    if raw is None or isinstance(raw, memoryview):
        return WireInput(name, datatype, tuple(shape), parameters, contents, raw)
    return WireInput(name, datatype, tuple(shape), parameters, contents, raw.view, raw)


def _output(walk: Walk, start: int, stop: int, limit: int) -> WireOutput:
    name = ""
    parameters: dict[str, Parameter] = {}
    for tag, first, end in walk.fields(start, stop):
        if tag == 0x0A:
            name = walk.text(first, end, "outputs.name")
        elif tag == 0x12:
            add_parameter(walk, first, end, parameters, limit)
    return WireOutput(name, parameters)


def response_parts(
    model_name: str,
    model_version: str,
    id: str,
    parameters: Mapping[str, Parameter],
    outputs: Iterable[_OutputRow],
    raw: Iterable[Part],
) -> list[Part]:
    """Return a ModelInferResponse in parts. The members of `raw` are among the parts, uncopied."""
    texts = ((0x0A, model_name), (0x12, model_version), (0x1A, id))
    head = [encode_field(tag, text.encode()) for tag, text in texts if text]
    if parameters:
        head.append(encode_parameters(0x22, parameters))
    head += [_output_field(*output) for output in outputs]
    parts: list[Part] = [b"".join(head)]
    for part in raw:
        parts += (b"\x32" + encode_varint(memoryview(part).nbytes), part)
    return parts


@lru_cache(1024)
def _output_field(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    """Encode an output's name, datatype and shape. Cached, because shapes repeat."""
    body = encode_field(0x0A, name.encode()) + encode_field(0x12, datatype.encode())
    if shape:
        body += encode_field(0x1A, b"".join([encode_varint(dim) for dim in shape]))
    return encode_field(0x2A, body)


def encode_stream_response(error_message: str, parts: list[Part] | None) -> bytes:
    """Encode a ModelStreamInferResponse. `parts` from `response_parts` are copied once. Raise
    InvalidArgument if the response is larger than a gRPC message can be."""
    head = encode_field(0x0A, error_message.encode()) if error_message else b""
    if parts is None:
        return head
    head += b"\x12" + encode_varint(sum([memoryview(part).nbytes for part in parts]))
    check_size(len(head) + sum([memoryview(part).nbytes for part in parts]))
    return b"".join([head, *parts])


def check_size(size: int) -> None:
    """Raise InvalidArgument if `size` bytes are more than a gRPC message can have."""
    if size > MAX_RESPONSE_BYTES:
        raise InvalidArgument(
            f"Response has byte size {size} which exceeds gRPC's byte size limit"
            f" {MAX_RESPONSE_BYTES}."
        )
