"""The cache's book against a list, and the conditions under which two requests are equal."""

from __future__ import annotations

import mmap
from hashlib import sha256
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec import json, msgpack
from msgspec.structs import replace

from shmserve._generated import grpc_service_pb2 as pb
from shmserve.config import Settings
from shmserve.core.memory.lru_book import LruBook
from shmserve.core.registry import LiveInstance, ModelEntry, ModelState, Snapshot
from shmserve.dispatch.cache.cache_key import CacheInput, cache_key, revisions
from shmserve.dispatch.outcome import RunOptions
from shmserve.frontends.grpc.request_mapping import to_request
from shmserve.protocol.oip.request import InferRequest
from shmserve.protocol.oip.request import parse_request as parse_json
from shmserve.protocol.protobuf.infer_wire import parse_request as parse_wire
from tests.unit.rig import SPEC

LIMIT = 100
KEYS = st.integers(0, 6)


class LruMachine(RuleBasedStateMachine):
    """`kept`: key, item and size, the least recently used first."""

    def __init__(self) -> None:
        super().__init__()
        self.book: LruBook[int, int] = LruBook(LIMIT)
        self.kept: list[tuple[int, int, int]] = []
        self.items = 0

    @rule(key=KEYS)
    def get(self, key: int) -> None:
        found = [each for each in self.kept if each[0] == key]
        assert self.book.get(key) == (found[0][1] if found else None)
        self.kept = [each for each in self.kept if each[0] != key] + found

    @rule(key=KEYS, size=st.integers(1, LIMIT + 20))
    def add(self, key: int, size: int) -> None:
        self.items += 1
        gone = self.book.add(key, self.items, size)
        if size > LIMIT:
            assert gone == [self.items]
            return
        rest = [each for each in self.kept if each[0] != key]
        while sum(each[2] for each in rest) + size > LIMIT:
            del rest[0]
        assert sorted(gone) == sorted(e[1] for e in self.kept if e not in rest)
        self.kept = [*rest, (key, self.items, size)]

    @rule(nbytes=st.integers(0, LIMIT + 20))
    def evict(self, nbytes: int) -> None:
        gone = self.book.evict(nbytes)
        freed = 0
        while self.kept and freed < nbytes:
            _, item, size = self.kept.pop(0)
            freed += size
            assert item == gone.pop(0)
        assert not gone

    @invariant()
    def adds_up(self) -> None:
        assert self.book.nbytes == sum(each[2] for each in self.kept) <= LIMIT
        assert len(self.book) == len(self.kept)


TestLruMachine = LruMachine.TestCase

INPUTS = st.lists(
    st.tuples(
        st.sampled_from(["A", "B"]),
        st.sampled_from(["FP32", "BYTES"]),
        st.tuples(st.integers(1, 2)),
        st.binary(max_size=3),
    ),
    max_size=2,
    unique_by=lambda tensor: tensor[0],
)
PARAMETERS = st.dictionaries(
    st.sampled_from(["x", "y", "priority"]), st.sampled_from([1, "1", 2]), max_size=2
)
REQUESTS = st.tuples(INPUTS, PARAMETERS, st.sampled_from([(), ("OUT",)]), st.integers(1, 2))


def ready(host: int, revision: int = 1) -> ModelEntry:
    """Return the model as published on a host. Each host has its own processes, sockets and
    revisions."""
    instance = LiveInstance(f"m/1/0@{revision}", f"x-{host}", f"{host}.sock", host)
    return ModelEntry(SPEC, ModelState.READY, (instance,))


def key_of(request: Any, host: int = 1) -> tuple[bytes, Any]:
    """Return the key, and the revisions that must match for a cached answer."""
    inputs, parameters, outputs, revision = request
    entry = ready(host, revision)
    options = RunOptions(parameters=parameters, outputs=outputs, request_id=str(id(request)))
    tensors = [CacheInput(*tensor[:3], memoryview(tensor[3])) for tensor in inputs]  # type: ignore[call-arg]
    snapshot = Snapshot(f"e{host}", host)
    return cache_key(entry, snapshot, options, tensors), revisions(entry, snapshot)


@given(REQUESTS, REQUESTS)
def test_the_same_requests_and_no_others_have_one_key(one: Any, other: Any) -> None:
    def matters(request: Any) -> Any:
        inputs, parameters, *rest = request
        return sorted(inputs), {k: v for k, v in parameters.items() if k != "priority"}, rest

    # 1 and "1" are two parameters, but True == 1 is not drawn
    assert (key_of(one) == key_of(other)) == (matters(one) == matters(other))
    assert key_of(one)[0] == key_of((*one[:3], 7), host=2)[0], "a host's revision is no part of it"


def test_the_format_of_a_key_is_stable() -> None:
    tensors = [CacheInput("B", "FP32", (1,), memoryview(b"1234"))]
    tensors.insert(0, CacheInput("C", "UINT8", (2,), memoryview(b"56")))
    options = RunOptions(outputs=("OUT",), parameters={"y": 1.5, "x": "1", "timeout": 7})
    told = (
        *(1, [["m", "1", []]], ["OUT"], {"x": "1", "y": 1.5}),
        [["B", "FP32", [1], 4], ["C", "UINT8", [2], 2]],
    )
    expected = sha256(msgpack.encode(told) + b"1234" + b"56").digest()
    assert cache_key(ready(1), Snapshot("e", 1), options, tensors) == expected


def test_what_depends_on_more_than_its_request_has_no_key() -> None:
    entry, snapshot = ready(1), Snapshot("e", 1)
    assert revisions(entry, snapshot) == ("m/1@1",)
    for other in (replace(entry, spec=replace(SPEC, decoupled=True)), replace(entry, instances=())):
        assert revisions(other, snapshot) is None


# ------------------------------------------------ one request over several protocols

ARRAYS = st.lists(st.integers(0, 255), min_size=1, max_size=5)
GIVEN = st.dictionaries(st.sampled_from(["x", "y", "timeout"]), st.integers(0, 9), max_size=2)


def inline(data: list[int], parameters: dict[str, Any]) -> tuple[InferRequest, bytes]:
    """As HTTP with the array in JSON; and the array's bytes."""
    tensor = {"name": "IN", "datatype": "UINT8", "shape": [len(data)], "data": data}
    request = parse_json(
        json.encode({"id": "a", "inputs": [tensor], "parameters": parameters}), Settings()
    )
    (item,) = request.inputs
    values = json.decode(item.data)  # type: ignore[arg-type]
    return request, np.array(values, np.uint8).tobytes()


def binary(data: list[int], parameters: dict[str, Any]) -> tuple[InferRequest, bytes]:
    """As HTTP with binary data behind the JSON."""
    tensor: dict[str, Any] = {"name": "IN", "datatype": "UINT8", "shape": [len(data)]}
    tensor["parameters"] = {"binary_data_size": len(data)}
    told = {"inputs": [tensor], "parameters": {**parameters, "binary_data_output": True}}
    return parse_json(json.encode(told), Settings()), bytes(data)


def grpc(data: list[int], parameters: dict[str, Any]) -> tuple[InferRequest, bytes]:
    message = pb.ModelInferRequest(model_name="m", id="b")
    message.inputs.add(name="IN", datatype="UINT8", shape=[len(data)])
    message.raw_input_contents.append(bytes(data))
    for name, value in parameters.items():
        message.parameters[name].int64_param = value
    wire = parse_wire(message.SerializeToString())
    request, _ = to_request(wire, Settings())
    (item,) = wire.inputs
    assert item.raw is not None
    return request, bytes(item.raw)


def mapped(data: bytes) -> memoryview:
    """As bytes lie in shared memory, at some address and offset."""
    area = mmap.mmap(-1, 4096)
    area[64 : 64 + len(data)] = data
    return memoryview(area)[64 : 64 + len(data)]


WAYS = [(way, place) for way in (inline, binary, grpc) for place in (memoryview, mapped)]


@given(ARRAYS, ARRAYS, GIVEN, GIVEN)
def test_a_request_has_one_key_whichever_way_it_comes(
    data: list[int], other: list[int], parameters: Any, others: Any
) -> None:
    def key(way: Any, place: Any, host: int, data: list[int], parameters: Any) -> bytes:
        request, content = way(data, parameters)
        (item,) = request.inputs
        tensor = CacheInput(item.name, item.datatype, item.shape, place(content))
        names = tuple(output.name for output in request.outputs)
        options = RunOptions(request.id, names, request.parameters, caller_number=host)
        return cache_key(ready(host, host), Snapshot(f"e{host}", host), options, [tensor])

    asked = data, {k: v for k, v in parameters.items() if k != "timeout"}
    asked_too = other, {k: v for k, v in others.items() if k != "timeout"}
    keys = {key(*way, host, data, parameters) for host, way in enumerate(WAYS, 1)}
    assert len(keys) == 1
    assert (key(*WAYS[-1], 9, other, others) in keys) == (asked == asked_too)
