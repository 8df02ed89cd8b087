"""The cache's book against a list, and what makes two requests the same."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from msgspec.structs import replace

from shmserve.core.memory.lru_book import LruBook
from shmserve.core.registry import LiveInstance, ModelEntry, ModelState, Snapshot
from shmserve.dispatch.cache.response_cache import CacheInput, digest
from shmserve.dispatch.outcome import RunOptions
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


def key_of(request: Any) -> bytes | None:
    inputs, parameters, outputs, revision = request
    instance = LiveInstance(f"m/1/0@{revision}", "x", "x.sock", 1)
    entry = ModelEntry(SPEC, ModelState.READY, (instance,))
    options = RunOptions(parameters=parameters, outputs=outputs, request_id=str(id(request)))
    tensors = [CacheInput(*tensor[:3], memoryview(tensor[3])) for tensor in inputs]  # type: ignore[call-arg]
    return digest(entry, Snapshot("e", 1), options, tensors)


@given(REQUESTS, REQUESTS)
def test_the_same_requests_and_no_others_have_one_key(one: Any, other: Any) -> None:
    def matters(request: Any) -> Any:
        inputs, parameters, *rest = request
        return sorted(inputs), {k: v for k, v in parameters.items() if k != "priority"}, rest

    # 1 and "1" are two parameters, but True == 1 is not drawn
    assert (key_of(one) == key_of(other)) == (matters(one) == matters(other))


def test_what_depends_on_more_than_its_request_has_no_key() -> None:
    instance = LiveInstance("m/1/0", "x", "x.sock", 1)
    ready = ModelEntry(SPEC, ModelState.READY, (instance,))
    assert digest(ready, Snapshot("e", 1), RunOptions(), []) is not None
    for entry in (
        replace(ready, spec=replace(SPEC, decoupled=True)),
        replace(ready, instances=()),
    ):
        assert digest(entry, Snapshot("e", 1), RunOptions(), []) is None
