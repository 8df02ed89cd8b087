"""Threads for code of extensions, on a loop."""

import threading
from time import monotonic

from shmserve import waiting
from shmserve.errors import Unavailable
from shmserve.frontends.hub import Hub
from shmserve.frontends.side_threads import ExtensionThreads


def no_thread(_: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_without_a_thread_a_call_is_refused_and_never_runs_on_the_loop(monkeypatch) -> None:
    hub, threads = Hub(1, "some_threads"), ExtensionThreads(1, "some_threads", 60.0)
    ran_in, told = [], []

    def call() -> None:
        try:
            ran_in.append(threads.call(threading.get_ident))
        except Unavailable as ex:
            told.append(ex.message)
        hub.leave()

    waiting.install(hub)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", no_thread)
            hub.spawn(call)
            hub.run(monotonic() + 60)
        assert (ran_in, told) == ([], ["the server has no thread for the call now"])
        hub.spawn(call)
        hub.run(monotonic() + 60)
        assert ran_in
        assert ran_in != [threading.get_ident()]
    finally:
        hub.close()
        waiting.install(None)
