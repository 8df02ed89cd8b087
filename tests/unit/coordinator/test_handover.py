"""One executor takes over from another while requests run: each request is answered exactly
once."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import numpy as np
import pytest

from shmserve.core.registry import ModelEntry, ModelState, Snapshot
from shmserve.dispatch.pool.executor_pool import ExecutorPool
from shmserve.errors import NotFound, Unavailable
from shmserve.executor.backend import Request, Response
from tests.unit.dispatch.test_dispatch import (
    feed,
    into_offer,
    its_input,
    own_array,
    run,
    slots_in_use,
    until,
)
from tests.unit.rig import SPEC, Rig

ONES = np.ones(3, np.float32)


@pytest.mark.parametrize("model", [into_offer, own_array, its_input])
def test_no_request_is_lost_however_often_executors_change(rig: Rig, model: Any) -> None:
    stop = threading.Event()
    failed: list[BaseException] = []
    done = [0] * 4
    ran: list[int] = []

    def counted(request: Request) -> Response:
        ran.append(1)
        return model(request)

    def client(number: int) -> None:
        array = np.full(2000, number, np.float32)
        wanted = array + (1 if model is own_array else 0)
        while not stop.is_set():
            try:
                entry = rig.dispatcher.ready_model("m")
                assert (run(rig, entry, array) == wanted).all()
                done[number] += 1
            except BaseException as ex:
                failed.append(ex)
                return

    rig.serve(counted)
    threads = [threading.Thread(target=client, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for turn in range(40):
        before = sum(done)
        old = rig.executors[-1]
        rig.serve(counted)
        old.close()
        rig.executors.remove(old)
        until(lambda before=before: sum(done) > before or bool(failed), "no request came through")  # type: ignore[misc]
        assert not failed, (turn, failed)
    stop.set()
    for thread in threads:
        thread.join(30)
    assert failed == []
    assert len(ran) == sum(done), "each request ran exactly once"
    until(lambda: slots_in_use(rig) == 0, "slots are left")


def test_a_request_that_was_looked_up_before_goes_to_the_successor(rig: Rig) -> None:
    entry = rig.serve(into_offer)
    with rig.dispatcher.call(entry) as call:
        feed(call, ONES)  # type: ignore[arg-type]
        rig.serve(own_array)
        rig.executors.pop(0).close()
        (output,) = call.execute().outputs
        assert (np.frombuffer(output.view, np.float32) == 2).all()


def test_a_request_that_does_not_suit_the_successor_goes_to_the_old_while_it_is_there(
    rig: Rig,
) -> None:
    entry = rig.serve(into_offer)
    rig.serve(own_array, spec=msgspec.structs.replace(SPEC, max_batch_size=4))
    assert (run(rig, entry, ONES) == 1).all()
    rig.executors.pop(0).close()
    with pytest.raises(Unavailable, match="has been replaced by one with other inputs"):
        run(rig, entry, ONES)


def test_a_request_for_what_is_unloaded_is_told_so(rig: Rig) -> None:
    entry = rig.serve(into_offer)
    unloaded = ModelEntry(SPEC, ModelState.UNAVAILABLE, (), "unloaded", required=False)
    snapshot = Snapshot("cafe0123", 0, models={"m": {"1": unloaded}}, complete=True)
    rig.writer.publish(snapshot)
    assert (run(rig, entry, ONES) == 1).all(), "its executor is still there"
    rig.executors.pop().close()
    with pytest.raises(Unavailable, match="not at ready state"):
        run(rig, entry, ONES)
    with pytest.raises(NotFound, match="has no available versions"):
        rig.dispatcher.ready_model("m")
    assert slots_in_use(rig) == 0


def test_an_executor_that_has_ended_its_loop_leaves_no_request_unanswered(rig: Rig) -> None:
    """The executor's sockets still exist: requests sent now must fail at once, not be lost."""
    entry = rig.serve(into_offer)
    run(rig, entry, ONES)  # so that an idle lane exists
    old = rig.executors[0]
    old.loop.stop()
    old.thread.join(30)
    with pytest.raises(Unavailable, match="no executor of model 'm' is running now"):
        run(rig, entry, ONES)
    rig.serve(own_array)
    assert (run(rig, entry, ONES) == 2).all()


def test_what_was_sent_before_the_end_is_answered(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun = threading.Event(), threading.Event()
    sent: list[int] = []

    send = ExecutorPool.send

    def counted(*arguments: Any) -> None:
        send(*arguments)
        sent.append(1)

    monkeypatch.setattr(ExecutorPool, "send", counted)

    def waits(request: Request) -> Response:
        begun.set()
        assert gate.wait(30)
        return own_array(request)

    entry = rig.serve(waits)
    answers: list[Any] = []
    threads = [
        threading.Thread(target=lambda: answers.append(run(rig, entry, ONES)[0])) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    assert begun.wait(30)
    until(lambda: len(sent) == 4, "not all were sent")
    rig.executors[0].loop.stop()
    gate.set()
    for thread in threads:
        thread.join(30)
    assert answers == [2, 2, 2, 2]
