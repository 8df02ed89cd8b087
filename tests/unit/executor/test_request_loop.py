"""The ordinary loop: published status while requests wait, run and are cancelled."""

from __future__ import annotations

import os
import threading

import numpy as np

from shmserve.dispatch.calls.call import Call
from shmserve.errors import Cancelled, ShmserveError
from shmserve.executor.backend import Request, Response
from shmserve.shm.status_page import StatusView
from tests.unit.dispatch.test_dispatch import feed, own_array, until
from tests.unit.rig import Rig


def test_depth_and_business_are_published_with_every_change(rig: Rig) -> None:
    release = threading.Event()
    calls: dict[str, Call] = {}
    outcomes: dict[str, str] = {}

    def model(request: Request) -> Response:
        # Asking for `cancelled` makes the executor take in arrived messages.
        until(lambda: request.cancelled or release.is_set(), "nobody let it go on")
        return own_array(request)

    def ask(name: str) -> None:
        with rig.dispatcher.call(entry, cancellable=True) as calls[name]:  # type: ignore[assignment]
            feed(calls[name], np.ones(3, np.float32))
            try:
                calls[name].execute()
                outcomes[name] = "answered"
            except ShmserveError as ex:
                outcomes[name] = type(ex).__name__

    entry = rig.serve(model)
    status = rig.executors[0].status
    fd = status.segment.reader_fd()
    view = StatusView(fd)
    os.close(fd)
    assert (view.depth, status.busy_since) == (0, 0)
    threads = {name: threading.Thread(target=ask, args=(name,)) for name in ("a", "b", "c")}
    for depth, thread in enumerate(threads.values(), start=1):
        thread.start()
        until(lambda depth=depth: view.depth == depth, f"{depth} are not told of")  # type: ignore[misc]
    busy_since = status.busy_since
    assert busy_since
    calls["c"].cancel()
    until(lambda: view.depth == 2, "the cancelled one is still counted")
    assert status.busy_since == busy_since
    release.set()
    for thread in threads.values():
        thread.join()
    assert outcomes == {"a": "answered", "b": "answered", "c": Cancelled.__name__}
    until(lambda: (view.depth, status.busy_since) == (0, 0), "it seems to work")
    assert rig.executors[0].loop.executed == 2
