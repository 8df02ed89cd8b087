"""Requests like an earlier request: plans, counts after the answer, small outputs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.config import Settings
from shmserve.core.caller import Caller
from shmserve.core.registry import Region, Snapshot
from shmserve.core.stats import executor_counters, request_counters
from shmserve.core.stats.counter_pages import UNCOUNTED_WORD
from shmserve.errors import InvalidArgument, NotFound
from shmserve.executor.backend import Output, Request, Response
from shmserve.executor.loop.run_statistics import RunStatistics
from shmserve.executor.peers import lane_plans
from shmserve.executor.peers.lane_gate import LaneGate
from shmserve.executor.peers.lane_traffic import LaneTraffic
from shmserve.protocol.control.data_messages import OutputPlace, RegionRef
from shmserve.protocol.control.lane_messages import (
    LaneOutput,
    LaneRequest,
    LaneWindow,
)
from shmserve.tensor.config_document import BatchingEntry
from shmserve.tensor.dtypes import DATATYPES
from shmserve.tensor.spec import TensorSpec
from tests.integration.lane_client import floats, in_region, request
from tests.running_server import wait_until
from tests.unit.executor.test_batch_loop import spec_of
from tests.unit.executor.test_lane_channels import lane_to
from tests.unit.rig import SPEC, Rig

MINE = Region("mine", 5, "", 0, 4096, uid=1, sealed=True)


class Registry:
    """A registry with regions of the test."""

    def __init__(self, **regions: Region) -> None:
        self.publish(**regions)
        self.gate = LaneGate(SPEC, Settings(), lambda: self.snapshot, server_uid=0)

    def publish(self, **regions: Region) -> None:
        self.snapshot = Snapshot("cafe0123", 1, regions={f"1/{n}": r for n, r in regions.items()})

    def places(self, asked: LaneRequest, uid: int = 1) -> list[Any]:
        """Return the places that the executor gets for a request, of input and output."""
        execute, _ = self.gate.admit(Caller(uid), asked, 0)
        return [*(tensor.at for tensor in execute.inputs), *execute.places]


def with_output(asked: LaneRequest, offset: int = 0) -> LaneRequest:
    return replace(asked, outputs=(LaneOutput("OUT", LaneWindow("mine", offset, 64)),))


def test_other_memory_under_the_same_name_is_used_at_once() -> None:
    registry = Registry(mine=MINE)
    asked = with_output(request(1, in_region("mine", 16)))
    for _ in range(2):
        at = RegionRef(5, 0, 64)
        assert registry.places(asked) == [at, OutputPlace("OUT", at)]
    registry.publish(mine=replace(MINE, number=6))
    for _ in range(2):
        at = RegionRef(6, 0, 64)
        assert registry.places(asked) == [at, OutputPlace("OUT", at)]
    registry.publish(mine=replace(MINE, number=7, byte_size=32))
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="'mine'"):
            registry.places(asked)
    registry.publish(mine=replace(MINE, number=8, quarantined="it has shrunk"))
    with pytest.raises(InvalidArgument, match="it has shrunk"):
        registry.places(asked)
    registry.publish()
    for _ in range(2):
        with pytest.raises(NotFound, match="'mine'"):
            registry.places(asked)
    registry.publish(mine=MINE)
    assert registry.places(asked)[0] == RegionRef(5, 0, 64)


def test_a_plan_is_one_users() -> None:
    registry = Registry(mine=MINE)
    windows, small = with_output(request(1, in_region("mine", 16))), request(1, floats(1))
    numbers = set()
    for _ in range(2):
        registry.places(windows)
        for uid in (0, 2, -1):
            with pytest.raises(NotFound, match="'mine'"):
                registry.places(windows, uid)
    for uid in (1, 2, 1):
        numbers.add(registry.gate.admit(Caller(uid), small, 0)[0].caller_number)
    assert len(numbers) == 2


def test_plans_are_few_and_hold_no_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lane_plans, "_MAX_PLANS", 8)
    registry = Registry(mine=MINE)
    for offset in range(0, 400, 4):
        assert registry.places(with_output(request(1, in_region("mine", 1, offset)), offset))
        registry.places(request(1, floats(*range(offset // 4))))
    plans = registry.gate._plans
    assert 0 < len(plans._plain) <= 8
    assert 0 < len(plans._windowed) <= 8
    before = dict(plans._plain)
    execute, call = registry.gate.admit(Caller(1), request(9, floats(*range(1, 100))), 0)
    assert (call.inline, execute.request) == ((np.arange(1, 100, dtype="f4").tobytes(),), 9)
    assert plans._plain == before, "it differs in the bytes alone"
    registry.gate.admit(Caller(1), request(1, floats(1), parameters={"sequence_id": 5}), 0)
    assert plans._plain == before, "parameters are looked at each time"


# ------------------------------------------------------------------ counts after the answer


def test_an_answer_is_counted_after_it_was_sent_and_shows_so(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []
    rig.serve(lambda r: Response((Output("OUT", "FP32", r.inputs["IN"].numpy() + 1),)))
    (executor,) = rig.executors
    send, late = LaneTraffic._send, RunStatistics.ran_late

    def look() -> None:
        page = executor.lanes._counting._page
        assert page is not None
        runs = executor_counters.read(executor.status.counters)
        rows = request_counters.read(page.words)
        assert runs is not None
        assert rows is not None
        answered = sum(row.succeeded for row in rows.values())
        heads = (page.words[UNCOUNTED_WORD], executor.status.counters[UNCOUNTED_WORD])
        seen.append((answered, runs.requests, *map(bool, heads)))

    def sent(self: LaneTraffic, *arguments: Any) -> None:
        look()
        send(self, *arguments)

    def counted(self: RunStatistics, *arguments: Any) -> None:
        late(self, *arguments)
        look()

    monkeypatch.setattr(LaneTraffic, "_send", sent)
    monkeypatch.setattr(RunStatistics, "ran_late", counted)
    with lane_to(rig) as lane:
        for number in (1, 2):
            assert lane.ask(request(number, floats(1))).status == 200
            wait_until(lambda n=number: len(seen) == 2 * n, "the run is not counted")  # type: ignore[misc]
    assert seen == [(0, 0, 1, 1), (1, 1, 0, 0), (1, 1, 1, 1), (2, 2, 0, 0)]


# ------------------------------------------------------------------ small outputs

ARRAYS: dict[str, np.ndarray[Any, Any]] = {
    "FP32": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "INT64": np.arange(-3, 3)[::-2],
    "UINT8": np.arange(4095, dtype=np.uint8),
    "BOOL": np.array([True, False]),
    "FP16": np.array([1.5, np.inf], np.float16),
    "BF16": np.arange(3).astype(ml_dtypes.bfloat16),
    "FP64": np.empty((0, 3)),
    "INT8": np.array(7, np.int8),
}


@pytest.mark.parametrize("datatype", ARRAYS)
@pytest.mark.parametrize("offered", [False, True])
def test_a_small_output_takes_no_slot(rig: Rig, datatype: str, offered: bool) -> None:
    array = ARRAYS[datatype]

    def model(asked: Request) -> Response:
        given = array
        if offered:
            given = asked.offer("OUT", datatype, array.shape)
            given[...] = array
        assert not rig.executors[0].memory.rows("slots")
        return Response((Output("OUT", datatype, given),))

    spec = replace(SPEC, outputs=(TensorSpec("OUT", datatype, array.shape),))
    rig.serve(model, spec=spec)
    with lane_to(rig) as lane:
        answer = lane.ask(request(1, floats(1)))
    assert answer.status == 200, answer.error
    (output,) = answer.outputs
    assert (output.name, output.datatype, output.shape) == ("OUT", datatype, array.shape)
    assert isinstance(output.at, bytes)
    found = np.frombuffer(output.at, DATATYPES[datatype].numpy) if output.at else np.empty(0)
    assert np.array_equal(found.reshape(array.shape), array)
    assert (answer.receipt.copied_out, answer.receipt.inline) == (array.nbytes, array.nbytes + 4)


@pytest.mark.parametrize("kind", ["batches", "streams"])
def test_small_outputs_of_batches_and_streams_take_no_slot(rig: Rig, kind: str) -> None:
    def model(asked: Request) -> Response | None:
        x = asked.inputs["IN"].numpy()
        out = asked.offer("OUT", "FP32", x.shape)
        out[:] = x + 1
        answer = Response((Output("OUT", "FP32", out),))
        assert not rig.executors[0].memory.rows("slots")
        if asked.responses is None:
            return answer
        asked.responses.send(answer)
        out[:] += 1
        asked.responses.send(answer, final=True)
        return None

    batched = kind == "batches"
    rig.serve(model, spec=spec_of(BatchingEntry()) if batched else replace(SPEC, decoupled=True))
    with lane_to(rig) as lane:
        if batched:
            answers = [lane.ask(request(1, replace(floats(1, 2), shape=(2, 1))))]
        else:
            lane.send(request(1, floats(1, 2), credit=2))
            answers = [lane.receive(), lane.receive()]
    found = [np.frombuffer(a.outputs[0].at, "f4").tolist() for a in answers]  # type: ignore[arg-type]
    assert found == [[2, 3], [3, 4]][: len(answers)]
    assert answers[-1].final


@pytest.mark.parametrize("texts", [[], [b""], [b"a", b"b" * 4000], [b"c" * 4093]])
def test_small_texts_take_no_slot_and_large_ones_are_refused(rig: Rig, texts: list[bytes]) -> None:
    array = np.array(texts, object)
    rig.serve(
        lambda _: Response((Output("OUT", "BYTES", array),)),
        spec=replace(SPEC, outputs=(TensorSpec("OUT", "BYTES", (-1,)),)),
    )
    encoded = b"".join(len(text).to_bytes(4, "little") + text for text in texts)
    with lane_to(rig) as lane:
        answer = lane.ask(request(1, floats(1)))
    if len(encoded) < 4096:
        assert [output.at for output in answer.outputs] == [encoded]
    else:
        assert (answer.status, answer.code) == (400, "INVALID_ARGUMENT")
        assert "'OUT' has 4097 bytes and no window" in answer.error
    rig.assert_nothing_held()
