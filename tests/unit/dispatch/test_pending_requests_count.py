"""Number of pending requests, summed over the pages of all processes."""

from __future__ import annotations

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from msgspec.structs import replace

from shmserve.core.stats.counter_pages import Gauges
from shmserve.dispatch.outcome import RunOptions
from shmserve.executor.backend import Output, Request, Response
from shmserve.protocol.control.stats_messages import ModelReport, PageOwner, ProcessReport, Report
from shmserve.shm.status_page import DEPTH, RUNNING
from shmserve.tensor.config_document import (
    BatchingEntry,
    ConfigDocument,
    OldestEntry,
    SequenceEntry,
)
from shmserve.tensor.spec import EnsembleStep, TensorSpec
from tests.unit.dispatch.test_dispatch import until
from tests.unit.rig import SPEC, Rig

WAITING = 3
IN, OUT = TensorSpec("IN", "FP32", (1,)), TensorSpec("OUT", "FP32", (1,))
ROWS = TensorSpec("IN", "FP32", (-1, 1))
BATCHED = ConfigDocument(max_batch_size=2, dynamic_batching=BatchingEntry())
SEQUENCES = SequenceEntry(oldest=OldestEntry(max_candidate_sequences=4))
KINDS = {
    "one by one": SPEC,
    "dynamic": replace(
        SPEC, max_batch_size=2, inputs=(ROWS,), outputs=(replace(ROWS, name="OUT"),), config=BATCHED
    ),
    "sequences": replace(
        SPEC, inputs=(IN,), outputs=(OUT,), config=ConfigDocument(sequence_batching=SEQUENCES)
    ),
    "streams": replace(SPEC, decoupled=True),
}


class Held:
    """A model that answers only after `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.begun = threading.Semaphore(0)

    def __call__(self, request: Request) -> Response | None:
        self.begun.release()
        self.go.wait(60)
        response = Response((Output("OUT", "FP32", np.ones((1, 1), np.float32)),))
        if request.responses is None:
            return response
        request.responses.send(response, final=True)
        return None


@pytest.fixture
def rig(rig_with):
    return rig_with(max_streams=1)


def pending(rig: Rig) -> int:
    """Return the pending requests of the model "m", as the coordinator reports them."""
    (executor,) = rig.executors
    words = executor.status.words
    owner = PageOwner(executor.instance.process, "executor", os.getpid(), "m", "1")
    models = [ModelReport(*key, requests={"http": counts}) for key, counts in rig.counts().items()]
    process = ProcessReport(owner, Gauges(), words[DEPTH], 0, words[RUNNING])
    return Report(tuple(models), (process,), {}, {}).pending().get(("m", "1"), 0)


def ask(rig: Rig, model: str, number: int) -> None:
    start = {"sequence_id": number + 1, "sequence_start": True, "sequence_end": True}
    shape = (1, 1) if rig.dispatcher.ready_model(model).spec.max_batch_size else (1,)
    options = RunOptions(parameters=start)  # type: ignore[arg-type]
    with rig.dispatcher.call(rig.dispatcher.ready_model(model), options) as call:
        call.add_input("IN", "FP32", shape, call.reserve(4))
        for outcome in call.stream() if call.entry.spec.decoupled else [call.execute()]:  # type: ignore[attr-defined]
            assert outcome.error is None


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["m", "ensemble"])
def test_what_waits_is_pending_and_what_runs_is_not(rig: Rig, kind: str, model: str) -> None:
    spec, held = KINDS[kind], Held()
    if model == "ensemble":
        step = EnsembleStep("m", "1", {"IN": "IN"}, {"OUT": "OUT"})
        whole = replace(spec, name=model, platform="ensemble", steps=(step,))
        rig.serve(spec=replace(whole, config=ConfigDocument(model)))
    rig.serve(held, spec=spec)
    with ThreadPoolExecutor() as threads:
        asking = [threads.submit(ask, rig, model, 0)]
        assert held.begun.acquire(timeout=30)
        asking += [threads.submit(ask, rig, model, n) for n in range(1, WAITING + 1)]
        until(lambda: pending(rig) == WAITING, "they do not wait")
        held.go.set()
    assert [each.result() for each in asking] == [None] * (1 + WAITING)
    until(lambda: pending(rig) == 0, "something waits")
    assert not any(row.in_flight for row in rig.counts().values())
