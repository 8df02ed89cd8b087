"""An executor's use of its device between requests, and for waiting requests."""

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

from shmserve.dispatch.calls.call import Call
from shmserve.dispatch.outcome import RunOptions
from shmserve.errors import Cancelled
from shmserve.executor.backend import Request, Response
from shmserve.executor.devices import Devices
from shmserve.shm.mappings import Mappings
from tests.cuda.test_running import NBYTES, NUMBERS, add_one
from tests.unit import rig
from tests.unit.dispatch.test_dispatch import until
from tests.unit.rig import feed


def test_one_that_is_cancelled_then_leaves_nothing_on_the_device(
    cupy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rig, "Devices", lambda _, mappings: Devices(0, mappings))
    monkeypatch.setattr(rig.FunctionBackend, "reads_on_device", True)
    pool = cupy.get_default_memory_pool()
    before = pool.used_bytes()
    calls: dict[str, Call] = {}

    def model(request: Request) -> Response:
        def await_queue(length: int) -> None:
            # A model that reads `cancelled` makes the loop receive new messages.
            until(lambda: not request.cancelled and loop.queued == length, "it did not come")

        if request.id == "first":
            threads["second"].start()
            await_queue(1)
            threads["third"].start()
            await_queue(2)
        else:
            assert pool.used_bytes() >= before + 2 * NBYTES
            calls["third"].cancel()
            await_queue(0)
        return add_one(request)

    def ask(name: str) -> None:
        with plane.dispatcher.call(entry, RunOptions(name), True) as calls[name]:  # type: ignore[assignment]
            feed(calls[name], NUMBERS)
            try:
                calls[name].execute()
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
        until(lambda: pool.used_bytes() <= before, "its input stayed")
    finally:
        plane.close()


@pytest.mark.fake_cuda  # not every device pins read-only memory
@pytest.mark.parametrize("decoupled", [False, True])
def test_what_idle_executors_have_pinned_is_let_go(
    cupy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoupled: bool
) -> None:
    """The owner of the memory, a frontend, may have freed it long ago."""
    devices = Devices(0, Mappings())
    monkeypatch.setattr(rig, "Devices", lambda *_: devices)
    monkeypatch.setattr("shmserve.executor.loop.loop.WAKE_S", 0.02)
    pinned: list[int] = []

    def model(request: Request) -> Response | None:
        response = add_one(request)
        pinned.append(devices.open().pins.nbytes)
        if request.responses is None:
            return response
        request.responses.send(response, final=True)
        return None

    plane = rig.Rig(tmp_path)
    try:
        entry = plane.serve(model, spec=structs.replace(rig.SPEC, decoupled=decoupled))
        with plane.dispatcher.call(entry) as call:
            feed(call, np.zeros(1 << 16, np.float32))
            if decoupled:
                assert len(list(call.stream())) == 1
            else:
                call.execute()
        assert pinned[0] > 0
        monkeypatch.setattr(plane.executors[0].loop, "_idle_s", 0.0)
        until(lambda: not devices.open().pins.nbytes, "it stays pinned")
    finally:
        plane.close()


def test_an_idle_executor_ends_with_its_device(
    cupy: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = Devices(0, Mappings())
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(rig, "Devices", lambda *_: devices)
    monkeypatch.setattr("shmserve.executor.loop.loop.WAKE_S", 0.02)
    monkeypatch.setattr("os.kill", lambda *arguments: killed.append(arguments))
    plane = rig.Rig(tmp_path)
    try:
        plane.serve(add_one)
        devices.open().lost = "a probe found it so"
        until(lambda: bool(killed), "it goes on")
        assert killed[0] == (os.getpid(), signal.SIGKILL)
    finally:
        plane.close()
