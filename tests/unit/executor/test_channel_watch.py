"""Two threads that take turns with the channels: while the model runs, and after a failure."""

import threading

import pytest

from shmserve.executor.loop.channel_watch import ChannelWatch


def test_the_channels_have_one_thread_at_a_time() -> None:
    inside = threading.Lock()
    attended, woken = threading.Event(), threading.Event()

    def attend() -> None:
        assert inside.acquire(blocking=False)
        attended.set()
        woken.wait(10)
        inside.release()

    watch = ChannelWatch(attend, woken.set, lambda: None)

    def serve() -> None:
        for _ in range(3):
            assert inside.acquire(blocking=False)
            inside.release()
            attended.clear()
            woken.clear()
            with watch:
                assert attended.wait(10)

    watch.serve(serve)


def test_a_defect_in_the_second_thread_ends_the_first_and_closes_the_channels(monkeypatch) -> None:
    disconnected = threading.Event()
    monkeypatch.setattr(threading, "excepthook", lambda _: None)

    def attend() -> None:
        raise ZeroDivisionError

    watch = ChannelWatch(attend, lambda: None, disconnected.set)

    def serve() -> None:
        with watch:  # the model runs, and does not notice
            assert disconnected.wait(10)

    with pytest.raises(RuntimeError, match="has failed"):
        watch.serve(serve)
