"""Any tensor survives JSON and binary; any text and any JSON is either fine or refused."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shmserve.config import Settings
from shmserve.errors import InvalidArgument
from shmserve.frontends.http.routes.application import create_app
from shmserve.protocol.oip import tensor_json
from shmserve.protocol.oip.answer import json_data
from shmserve.protocol.oip.request import parse_request
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES
from shmserve.testing import fake_models
from tests.fuzz.http_targets import inference_environ

LIMITS = Settings()
_APP = create_app(fake_models.dispatcher(), LIMITS)  # type: ignore[arg-type]

_FIXED = [name for name, d in DATATYPES.items() if d.json_ok and d.itemsize]
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.floats(),
    st.text(max_size=4),
    st.sampled_from(["INPUT0", "FP32", "r"]),
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


@st.composite
def tensors(draw: st.DrawFn) -> tuple[str, bytes, int]:
    """Draw a datatype, a tensor's bytes, and the number of elements."""
    name = draw(st.sampled_from(_FIXED))
    count = draw(st.integers(0, 20))
    size = count * DATATYPES[name].itemsize
    data = draw(st.binary(min_size=size, max_size=size))
    if name == "BOOL":
        data = bytes(byte & 1 for byte in data)
    return name, data, count


def through_json(name: str, data: bytes, count: int) -> bytes:
    text = msgspec.json.encode(json_data(data, name, (count,), "OUT", "m"))
    decoded = tensor_json.decode(msgspec.Raw(text), DATATYPES[name], count, "in")
    buffer = bytearray(decoded.nbytes)
    decoded.write(memoryview(buffer))
    return bytes(buffer)


@given(tensors())
def test_fixed_size_tensors_survive_json(tensor: tuple[str, bytes, int]) -> None:
    name, data, count = tensor
    dtype = DATATYPES[name].numpy
    want, got = np.frombuffer(data, dtype), np.frombuffer(through_json(*tensor), dtype)
    assert len(got) == count
    if dtype.kind == "f":  # all NaNs count as equal
        nan = np.isnan(want)
        assert (np.isnan(got) == nan).all()
        want, got = want[~nan], got[~nan]
    assert want.tobytes() == got.tobytes()


@given(st.lists(_TEXT, max_size=10))
def test_strings_survive_json(elements: list[str]) -> None:
    data = bytes_codec.encode(elements)
    assert through_json("BYTES", data, len(elements)) == data


@given(st.lists(st.binary(max_size=20), max_size=20))
def test_framing_survives(elements: list[bytes]) -> None:
    data = bytes_codec.encode(elements)
    assert bytes_codec.decode(data, len(elements), "IN", "m") == elements


@given(st.binary(max_size=60), st.integers(0, 5))
def test_any_bytes_are_framed_or_refused(data: bytes, count: int) -> None:
    try:
        elements = bytes_codec.decode(data, count, "IN", "m")
    except InvalidArgument:
        return
    assert bytes_codec.encode(elements) == data
    assert len(elements) == count


@given(st.binary(max_size=200))
def test_any_bytes_as_a_request(text: bytes) -> None:
    try:
        parse_request(text, LIMITS)
    except InvalidArgument:
        pass  # nothing else may come out


def _maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Mostly the right kind of value, sometimes any."""
    return st.one_of(strategy, strategy, strategy, JSON)


_PARAMETERS = st.dictionaries(
    st.sampled_from(
        [
            "binary_data_size",
            "shared_memory_region",
            "shared_memory_offset",
            "shared_memory_byte_size",
            "binary_data",
            "classification",
            "binary_data_output",
            "sequence_id",
            "priority",
            "triton_x",
            "x",
        ]
    ),
    st.one_of(st.integers(-2, 40), st.booleans(), SCALARS),
    max_size=2,
)
_NAMES = st.sampled_from(["INPUT0", "INPUT1", "OUTPUT0", "OUTPUT1"])
_INPUTS = st.fixed_dictionaries(
    {"name": _maybe(_NAMES), "shape": _maybe(st.lists(st.integers(0, 4), max_size=2))},
    optional={
        "datatype": _maybe(st.sampled_from(["FP32", "INT32", "BYTES", "FP16", "nonsense"])),
        "data": _maybe(st.lists(st.one_of(st.integers(0, 9), st.floats()), max_size=4)),
        "parameters": _maybe(_PARAMETERS),
    },
)
_OUTPUTS = st.fixed_dictionaries(
    {"name": _maybe(_NAMES)}, optional={"parameters": _maybe(_PARAMETERS)}
)
REQUESTS = st.fixed_dictionaries(
    {"inputs": _maybe(st.lists(_maybe(_INPUTS), max_size=2))},
    optional={
        "id": _maybe(st.text(max_size=3)),
        "outputs": _maybe(st.lists(_maybe(_OUTPUTS), max_size=2)),
        "parameters": _maybe(_PARAMETERS),
    },
)


@settings(max_examples=300)
@given(
    st.one_of(REQUESTS, JSON),
    st.binary(max_size=20),
    st.sampled_from(["identity", "add_sub", "identity_bytes", "identity_fp16", "batched"]),
    st.one_of(st.just(0), st.integers(-1, 1)),
)
def test_any_json_is_answered_in_order(document: Any, tail: bytes, model: str, offset: int) -> None:
    """Through the whole application: an answer or an error of the client, never a 5xx."""
    head = json.dumps(document).encode()
    body = head + tail
    environ = inference_environ(model, body)
    environ["HTTP_INFERENCE_HEADER_CONTENT_LENGTH"] = str(len(head) + offset)
    started: list[Any] = []
    result = _APP(environ, lambda status, fields, _=None: started.append(int(status[:3])))
    answer = b"".join(result)
    if hasattr(result, "close"):
        result.close()
    assert started[0] < 500, answer
    if started[0] != 200:
        assert json.loads(answer)["error"]
