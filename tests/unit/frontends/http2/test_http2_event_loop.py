"""The loop of the HTTP/2 engine: a failure in one call's work does not affect other calls."""

from shmserve.frontends.grpc.http2_engine.event_loop import EventLoop


def test_a_defect_at_a_turns_end_does_not_end_the_loop() -> None:
    done: list[str] = []

    def defect() -> None:
        done.append("defect")
        raise RuntimeError("a defect")

    loop = EventLoop(1)
    for action in (defect, lambda: done.append("other"), loop.stop):
        loop.at_turns_end(action)
    loop.post(lambda: None)  # so that the loop does not wait
    loop.run()
    assert done == ["defect", "other"]
