"""Valid ModelInferRequest messages that no encoder writes, and protobuf's reading of them.

Fields in any order and number, unpacked and split arrays, unknown fields and groups, longer
varints than needed. The generated classes are the reference.
"""

import struct
from typing import Any

import numpy as np
from hypothesis import strategies as st

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.protocol.protobuf.infer_contents import Contents
from shmserve.protocol.protobuf.infer_parameters import Uint64
from shmserve.protocol.protobuf.infer_wire import WireInferRequest

_MASK = (1 << 64) - 1
_NATURAL = {
    "bool_contents": "BOOL",
    "int_contents": "INT32",
    "int64_contents": "INT64",
    "uint_contents": "UINT32",
    "uint64_contents": "UINT64",
    "fp32_contents": "FP32",
    "fp64_contents": "FP64",
    "bytes_contents": "BYTES",
}
_NUMPY = {"BOOL": "?", "INT32": "i4", "INT64": "i8", "UINT32": "u4", "UINT64": "u8"}
_NUMPY |= {"FP32": "f4", "FP64": "f8"}


def varint(value: int, longer: int = 0) -> bytes:
    """Encode a varint with up to `longer` superfluous bytes, at most ten bytes in all."""
    encoded = bytearray()
    value &= _MASK
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    for _ in range(min(longer, 10 - len(encoded))):
        encoded[-1] |= 0x80
        encoded.append(0)
    return bytes(encoded)


def sized(number: int, payload: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(payload)) + payload


def _joined(fields: st.SearchStrategy[bytes], most: int = 6) -> st.SearchStrategy[bytes]:
    return st.lists(fields, max_size=most).map(b"".join)


_words = st.integers(0, _MASK) | st.integers(0, 200)
_varints = st.builds(varint, _words, st.integers(0, 2))
_texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=6).map(str.encode)
_names = st.sampled_from([b"INPUT0", b"FP32", b"shared_memory_region", b"k", b""]) | _texts


def _value(number: int) -> st.SearchStrategy[bytes]:
    """A field of any wire type."""
    return st.one_of(
        _varints.map(lambda v: varint(number << 3) + v),
        st.binary(min_size=8, max_size=8).map(lambda v: varint(number << 3 | 1) + v),
        st.binary(max_size=5).map(lambda v: sized(number, v)),
        st.binary(min_size=4, max_size=4).map(lambda v: varint(number << 3 | 5) + v),
    )


_numbers = st.integers(11, 20) | st.integers(1 << 20, (1 << 29) - 1)
_plain_unknown = _numbers.flatmap(_value)
UNKNOWN = st.recursive(
    _plain_unknown,
    lambda inner: st.builds(
        lambda number, body: varint(number << 3 | 3) + body + varint(number << 3 | 4),
        _numbers,
        _joined(inner, 3),
    ),
    max_leaves=4,
)


def _field(number: int, payloads: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    return payloads.map(lambda payload: sized(number, payload))


def _packable(number: int, kind: int, elements: st.SearchStrategy[bytes]) -> Any:
    """Draw repeated scalars: packed or one by one."""
    one = elements.map(lambda element: varint(number << 3 | kind) + element)
    return _field(number, st.lists(elements, max_size=5).map(b"".join)) | one


_fixed32 = st.binary(min_size=4, max_size=4)
_fixed64 = st.binary(min_size=8, max_size=8)
_choice = st.one_of(
    _varints.map(lambda v: b"\x08" + v),
    _varints.map(lambda v: b"\x10" + v),
    _names.map(lambda v: sized(3, v)),
    _fixed64.map(lambda v: b"\x21" + v),
    _varints.map(lambda v: b"\x28" + v),
)
_parameter = st.builds(
    lambda before, choice, after: before + choice + after,
    _joined(_choice | UNKNOWN, 2),
    _choice,
    _joined(UNKNOWN, 1),
)
_entry = st.builds(
    lambda fields, value: b"".join(fields) + value,
    st.lists(_field(1, _names) | _field(2, _parameter), max_size=2),
    _field(2, _parameter),
)
CONTENTS = _joined(
    st.one_of(
        *(_packable(number, 0, _varints) for number in range(1, 6)),
        _packable(6, 5, _fixed32),
        _packable(7, 1, _fixed64),
        _field(8, st.binary(max_size=5)),
        UNKNOWN,
    )
)
_input = _joined(
    st.one_of(
        _field(1, _names),
        _field(2, _names),
        _packable(3, 0, _varints),
        _field(4, _entry),
        _field(5, CONTENTS),
        UNKNOWN,
        _value(1).filter(lambda field: field[0] & 7 != 2),  # a known field of another type
    ),
    8,
)
_output = _joined(_field(1, _names) | _field(2, _entry) | UNKNOWN)
REQUESTS = _joined(
    st.one_of(
        _field(1, _names),
        _field(2, _names),
        _field(3, _names),
        _field(4, _entry),
        _field(5, _input),
        _field(6, _output),
        _field(7, st.binary(max_size=20)),
        UNKNOWN,
    ),
    10,
)


def told(parameters: Any) -> dict[str, Any]:
    """Parameters of a generated message as comparable values."""
    found = {}
    for key, value in parameters.items():
        kind = value.WhichOneof("parameter_choice")
        held = getattr(value, kind)
        found[key] = (kind, struct.pack("<d", held) if kind == "double_param" else held)
    return found


def seen(parameters: dict[str, Any]) -> dict[str, Any]:
    """Parameters as parsed, in the same form."""
    found: dict[str, Any] = {}
    for key, value in parameters.items():
        if type(value) is float:
            found[key] = ("double_param", struct.pack("<d", value))
        else:
            kinds = {bool: "bool_param", int: "int64_param", str: "string_param"}
            found[key] = (kinds.get(type(value), "uint64_param"), value)
            assert type(value) in kinds or type(value) is Uint64
    return found


def elements(contents: Contents | None) -> list[bytes]:
    """Return every field of typed contents as tensor bytes of the field's datatype."""
    if contents is None:
        return []
    found = []
    for number, datatype in enumerate(_NATURAL.values(), 1):
        spans = {number: contents.spans[number]} if number in contents.spans else {}
        alone = Contents(contents.data, spans, contents.name, contents.model)
        target = bytearray(alone.nbytes(datatype, alone._count(number)))
        alone.write(memoryview(target), datatype)
        found.append(bytes(target))
    return found


def reference_elements(contents: Any) -> list[bytes]:
    found = []
    for field, datatype in _NATURAL.items():
        values = getattr(contents, field)
        if datatype == "BYTES":
            found.append(b"".join(len(v).to_bytes(4, "little") + v for v in values))
        else:
            found.append(np.array(list(values), _NUMPY[datatype]).tobytes())
    return found


def assert_same(parsed: WireInferRequest, data: bytes) -> None:
    """Check that `parsed` equals the generated class's reading of `data`, which must succeed."""
    message = pb.ModelInferRequest.FromString(data)
    names = (parsed.model_name, parsed.model_version, parsed.id)
    assert names == (message.model_name, message.model_version, message.id)
    assert seen(parsed.parameters) == told(message.parameters)
    outputs = [(output.name, seen(output.parameters)) for output in parsed.outputs]
    assert outputs == [(output.name, told(output.parameters)) for output in message.outputs]
    assert parsed.raw_count == len(message.raw_input_contents)
    assert len(parsed.inputs) == len(message.inputs)
    raw = iter(message.raw_input_contents)
    for mine, its in zip(parsed.inputs, message.inputs, strict=True):
        assert (mine.name, mine.datatype) == (its.name, its.datatype)
        assert mine.shape == tuple(its.shape)
        assert seen(mine.parameters) == told(its.parameters)
        assert (mine.contents is not None) == its.HasField("contents")
        if mine.contents is not None:
            # NaNs of numpy arrays made from Python floats may differ in their bits
            for left, right in zip(
                elements(mine.contents), reference_elements(its.contents), strict=True
            ):
                assert left == right or _same_floats(left, right)
        expected = None if "shared_memory_region" in its.parameters else next(raw, None)
        assert (None if mine.raw is None else bytes(mine.raw)) == expected


def _same_floats(left: bytes, right: bytes) -> bool:
    return any(
        len(left) == len(right)
        and np.array_equal(np.frombuffer(left, kind), np.frombuffer(right, kind), equal_nan=True)
        for kind in ("f4", "f8")
        if len(left) % np.dtype(kind).itemsize == 0
    )
