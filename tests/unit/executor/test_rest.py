"""Executors and frontends that have nothing to do are woken by what comes, and by nothing else."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shmserve.executor.loop.serving_loop import REST_S
from tests.unit.dispatch.test_dispatch import feed, into_offer, until
from tests.unit.rig import Rig


def test_who_has_nothing_to_do_rests_and_serves_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = Rig(tmp_path)
    try:
        entry = plane.serve(into_offer)
        loop = plane.executors[0].loop
        waits: list[float] = []
        receive = loop._channels.receive
        monkeypatch.setattr(loop._channels, "receive", lambda s: (waits.append(s), receive(s))[1])
        for _ in range(2):
            waits.clear()
            with plane.dispatcher.call(entry) as call:
                feed(call, np.zeros(4, np.float32))
                call.execute()
                assert REST_S not in waits[1:], "its output is held still"
            until(lambda: waits[-1:] == [REST_S], "the executor does not rest")
            until(lambda: plane.dispatcher._resting, "the frontend does not rest")
    finally:
        plane.close()
