"""Idle executors and frontends are woken by messages, and by nothing else."""

from __future__ import annotations

from typing import Any

import numpy as np

from shmserve.dispatch.pool.rest import Rest
from shmserve.dispatch.process import dispatcher
from shmserve.executor.backend import Request, Response
from shmserve.executor.loop.loop import REST_S, Loop
from shmserve.executor.loop.loop_assembly import make_loop
from tests.unit import rig
from tests.unit.dispatch.test_dispatch import into_offer, until
from tests.unit.rig import feed


def test_who_has_nothing_to_do_rests_and_serves_again(rig_with, monkeypatch) -> None:
    waits: list[float] = []

    def model(request: Request) -> Response:
        waits.clear()
        return into_offer(request)

    plane = rig_with()
    entry = plane.serve(model)
    loop = plane.executors[0].loop
    receive = loop._receive
    monkeypatch.setattr(loop, "_receive", lambda s, _: (waits.append(s), receive(s))[1])
    for _ in range(2):
        with plane.dispatcher.call(entry) as call:
            feed(call, np.zeros(4, np.float32))
            call.execute()
            assert REST_S not in waits, "its output is held still"
        until(lambda: waits[-1:] == [REST_S], "the executor does not rest")
        until(lambda: plane.dispatcher.rest.resting, "the frontend does not rest")


def test_what_is_prepared_for_a_request_that_waits_for_resources_is_kept(rig_with, monkeypatch):
    told: list[str] = []

    class Resources:
        held = False

        def may_run(self, is_due: bool) -> None:
            told.append("due" if is_due else "none")
            if is_due:
                self.held = told.count("due") == 3
                plane.executors[0].loop.wake()

        def spent(self) -> None:
            self.held = False

    def limited(*parts: Any) -> Loop:
        loop = make_loop(*parts)
        loop._resources = Resources()  # type: ignore[assignment]
        loop._runner.rest = lambda: told.append("rest")  # type: ignore[method-assign]
        return loop

    monkeypatch.setattr(rig, "make_loop", limited)
    plane = rig_with()
    with plane.dispatcher.call(plane.serve(into_offer)) as call:
        feed(call, np.zeros(4, np.float32))
        call.execute()
    at = told.index("due")
    assert told[at : at + 3] == ["due"] * 3
    until(lambda: told[-2:] == ["rest", "none"], "the runner does not rest")


def test_what_comes_back_late_is_passed_on_by_a_frontend_that_rests(rig_with, monkeypatch) -> None:
    monkeypatch.setattr(dispatcher, "_RESTING_S", 3600.0)
    plane = rig_with()
    with plane.dispatcher.call(plane.serve(into_offer)) as call:
        feed(call, np.zeros(4, np.float32))
        call.execute()
        give_back = call.lend()
    until(lambda: plane.dispatcher.rest.resting, "the frontend does not rest")
    (executor,) = plane.executors
    assert executor.memory.rows("slots")
    give_back()
    until(lambda: not executor.memory.rows("slots"), "its executor is not told")


def test_a_frontend_does_not_rest_while_something_is_out(rig_with, monkeypatch) -> None:
    plane = rig_with()
    until(lambda: plane.dispatcher.rest.resting, "the frontend does not rest")
    assert not plane.dispatcher._measure()
    pool = plane.dispatcher._pool(plane.serve(into_offer).instances[0], "/nowhere")
    plane.dispatcher.executors.pools["x0"] = pool
    pool.release([(1, 1)], 4096)  # an executor whose connection takes no more
    assert plane.dispatcher._measure()
    pool._pending.clear()
    pool.in_flight = 1  # with inputs in client memory
    assert plane.dispatcher._measure()
    pool.in_flight = 0
    assert not plane.dispatcher._measure()


def test_whoever_has_something_to_do_is_seen_by_the_next_look() -> None:
    woken: list[bool] = []
    rest = Rest(lambda: woken.append(True))
    rest.end()
    assert not woken
    assert rest.over()
    assert not rest.over()
    rest.resting = True
    rest.end()
    rest.end()
    assert woken == [True]
    assert rest.over()
