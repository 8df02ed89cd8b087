"""Requests that wait behind another while their inputs are already on the device."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from shmserve.dispatch import Call
from shmserve.errors import Cancelled
from shmserve.executor.backend import Request, Response
from shmserve.executor.devices import Devices
from tests.cuda.test_running import NBYTES, NUMBERS, add_one
from tests.unit import rig
from tests.unit.test_dispatch import feed, until


def test_one_that_is_cancelled_then_leaves_nothing_on_the_device(
    cupy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig, "Devices", lambda _, mappings: Devices(0, mappings))
    monkeypatch.setattr(rig.FunctionBackend, "reads_on_device", True)
    pool = cupy.get_default_memory_pool()
    calls: dict[str, Call] = {}

    def model(request: Request) -> Response:
        def await_queue(length: int) -> None:
            # A model that asks for `cancelled` has what came taken in.
            until(lambda: not request.cancelled and loop.queued == length, "it did not come")

        if request.id == "first":
            threads["second"].start()
            await_queue(1)
            threads["third"].start()
            await_queue(2)
        else:
            assert pool.used_bytes() >= 2 * NBYTES
            calls["third"].cancel()
            await_queue(0)
        return add_one(request)

    def ask(name: str) -> None:
        with plane.dispatcher.call(entry, cancellable=True) as calls[name]:
            feed(calls[name], NUMBERS)
            try:
                calls[name].execute(name)
                outcomes[name] = "answered"
            except Cancelled:
                outcomes[name] = "cancelled"

    outcomes: dict[str, str] = {}
    threads = {n: threading.Thread(target=ask, args=(n,)) for n in ("first", "second", "third")}
    plane = rig.Rig(tmp_path)
    entry = plane.serve(model)
    loop = plane.executors[0].loop
    try:
        threads["first"].start()
        until(lambda: len(outcomes) == 3, "there was no answer")
        assert outcomes == {"first": "answered", "second": "answered", "third": "cancelled"}
        until(lambda: not pool.used_bytes(), "its input stayed")
    finally:
        plane.close()
