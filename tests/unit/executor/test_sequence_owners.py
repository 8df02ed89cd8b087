"""Owners of sequences and callers of slots, over real sockets and shared memory."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from shmserve.core.registry import ModelEntry
from shmserve.dispatch.outcome import RunOptions
from shmserve.errors import DeadlineExceeded, InvalidArgument, QueueFull
from shmserve.executor.backend import Output, Request, Response
from shmserve.protocol.control.data_messages import Parameter
from tests.unit.dispatch.test_dispatch import until
from tests.unit.executor.test_sequence_loop import free_slots, spec_of
from tests.unit.rig import Rig

TOP = (1 << 31) - 1  # first id for a sequence whose own id is in use


class Tally:
    """A model that adds up what each sequence sends, by the sequence's id. `ids`: ids of all
    requests."""

    def __init__(self) -> None:
        self.ids: list[Parameter] = []
        self._sums: dict[Parameter, float] = {}

    def __call__(self, request: Request) -> Response:
        id = request.parameters["sequence_id"]
        self.ids.append(id)
        if request.parameters.get("sequence_start"):
            self._sums[id] = 0
        self._sums[id] += float(request.inputs["IN"].numpy()[0])
        return Response((Output("OUT", "FP32", np.full(1, self._sums[id], np.float32)),))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(tmp_path)
    yield rig
    rig.close()


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as executor:
        yield executor


def add(
    rig: Rig, entry: ModelEntry, owner: int, id: int | str, value: float, flags: str = "",
    **options: Any,
) -> float:  # fmt: skip
    """Send a request of an owner's sequence, and return the sequence's sum."""
    told: dict[str, Parameter] = {f"sequence_{flag}": True for flag in flags.split()}
    asked = RunOptions(parameters={"sequence_id": id, **told}, timeout_s=30, sequence_owner=owner)
    asked = msgspec.structs.replace(asked, **options)
    with rig.dispatcher.call(entry, asked) as call:
        slot = call.reserve(4)
        slot.view[:] = np.array([value], np.float32).tobytes()
        call.add_input("IN", "FP32", (1,), slot)
        (out,) = call.execute().outputs
        return float(np.frombuffer(bytes(out.view), np.float32)[0])


@pytest.mark.parametrize("instances", [1, 3])
def test_each_owner_finds_its_own_sequence_only(rig: Rig, instances: int) -> None:
    entry = rig.serve(*(Tally() for _ in range(instances)), spec=spec_of(slots=4))
    assert add(rig, entry, 1, 5, 100, "start") == 100
    for flags in ("", "end"):
        with pytest.raises(InvalidArgument, match=r"sequence 5 .* must specify the START flag"):
            add(rig, entry, 2, 5, 1, flags)
    assert add(rig, entry, 2, 5, 7, "start") == 7
    assert add(rig, entry, 0, 5, 3, "start") == 3
    assert [add(rig, entry, owner, 5, 1) for owner in (1, 2, 0)] == [101, 8, 4]
    assert add(rig, entry, 2, 5, 1, "end") == 9
    assert [add(rig, entry, owner, 5, 1, "end") for owner in (0, 1)] == [5, 102]
    assert sum(free_slots(rig)) == 4 * instances


def test_the_model_tells_equal_ids_apart(rig: Rig) -> None:
    model = Tally()
    entry = rig.serve(model, spec=spec_of(slots=8))
    for owner, id in ((1, 5), (2, 5), (2, "5"), (1, "5"), (2, TOP)):
        add(rig, entry, owner, id, 1, "start")
    assert model.ids == [5, TOP, str(TOP - 1), str(TOP - 2), TOP - 3]
    add(rig, entry, 1, 5, 1, "end")
    add(rig, entry, 2, 5, 1, "start end")  # begins anew, and keeps the id that the model has
    add(rig, entry, 2, 5, 1, "start end")
    assert model.ids[-3:] == [5, TOP, 5]


def test_an_error_names_the_id_that_the_client_knows(rig: Rig, threads: ThreadPoolExecutor) -> None:
    entry = rig.serve(Tally(), spec=spec_of(slots=1))
    loop = rig.executors[0].loop
    add(rig, entry, 1, 5, 1, "start")
    first = threads.submit(add, rig, entry, 2, 5, 1, "start", timeout_s=2.0)
    until(lambda: loop.queued == 1, "it does not wait")
    second = threads.submit(add, rig, entry, 2, 5, 1, "end")
    with pytest.raises(DeadlineExceeded):
        first.result(30)
    with pytest.raises(InvalidArgument, match="inference request for sequence 5 to model"):
        second.result(30)


def test_an_idle_sequence_gives_way_to_a_caller_without_one(
    rig: Rig, threads: ThreadPoolExecutor
) -> None:
    entry = rig.serve(Tally(), spec=spec_of(slots=2))
    for id in (1, 2):
        add(rig, entry, 0, id, 1, "start", caller_number=1)
    more = []
    for id in (3, 4, 5):
        more.append(threads.submit(add, rig, entry, 0, id, 1, "start", caller_number=1))
        until(lambda: rig.executors[0].loop.queued == len(more), "it does not wait")
    with pytest.raises(QueueFull, match="Exceeds maximum number of sequences"):
        add(rig, entry, 0, 6, 1, "start", caller_number=1)
    assert add(rig, entry, 0, 9, 1, "start", caller_number=2) == 1
    with pytest.raises(InvalidArgument, match=r"sequence 1 .* must specify the START flag"):
        add(rig, entry, 0, 1, 1, caller_number=1)
    assert add(rig, entry, 0, 2, 1, caller_number=1) == 2
    assert add(rig, entry, 0, 9, 1, "end", caller_number=2) == 2
    assert more[0].result(30) == 1
    for id in (2, 3):
        add(rig, entry, 0, id, 1, "end", caller_number=1)
    assert [each.result(30) for each in more] == [1, 1, 1]


def test_one_callers_sequences_keep_their_slots(rig: Rig, threads: ThreadPoolExecutor) -> None:
    entry = rig.serve(Tally(), spec=spec_of(slots=2))
    for id in (1, 2):
        add(rig, entry, 0, id, 1, "start", caller_number=1)
    with pytest.raises(DeadlineExceeded):
        add(rig, entry, 0, 3, 1, "start", caller_number=1, timeout_s=2.5)
    assert [add(rig, entry, 0, id, 1, caller_number=1) for id in (1, 2)] == [2, 2]
