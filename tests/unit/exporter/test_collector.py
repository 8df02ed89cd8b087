"""Results of an export by the collector's answer, and the log of failures."""

import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.sdk.resources import Resource

from shmserve.config import Settings
from shmserve.exporter import collector as collectors
from shmserve.exporter.span_export import SpanExport, queue_of_environment
from shmserve.log_fields import ATTRIBUTE
from shmserve.protocol.control.span_messages import Span, Spans
from tests.log_lines import log_lines
from tests.running_server import wait_until


class Scripted:
    """A collector that answers with the given statuses, and repeats the last status."""

    def __init__(self, *statuses: int) -> None:
        self.paths: list[str] = []
        ahead = list(statuses)
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                scripted.paths.append(self.path)
                self.send_response(ahead.pop(0) if len(ahead) > 1 else ahead[0])
                self.send_header("Location", "/elsewhere")
                self.end_headers()

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def started(monkeypatch):
    """What the end of the test closes."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setattr(collectors, "_FIRST_PAUSE_S", 0.02)
    with ExitStack() as made:
        yield made


def export(
    started: ExitStack, *statuses: int, timeout_s: float = 0.5
) -> tuple[SpanExport, Scripted]:
    """Export three spans, one at a time, to a collector that answers with the given statuses."""
    scripted = Scripted(*statuses)
    settings = Settings(otlp_endpoint=scripted.url + "/", otlp_timeout_s=timeout_s)
    made = SpanExport(settings, Resource({}))
    started.callback(scripted.close)
    started.callback(made.close, 10)
    made.start()
    made.put(Spans(tuple(Span(name, "1" * 32, "2" * 16, "", 1, 2) for name in "abc"), dropped=4))
    return made, scripted


def test_what_is_refused_is_not_sent_again(started: ExitStack, caplog) -> None:
    caplog.set_level("INFO")
    made, scripted = export(started, 200, 400, 302, timeout_s=30.0)
    wait_until(lambda: made.exported + made.refused == 3, "all that there was")
    assert (made.exported, made.refused, made.lost) == (1, 2, 4)
    assert scripted.paths == ["/v1/traces"] * 3, "nobody is led elsewhere"
    made.turn(1.0)
    assert "the collector does not take spans: status 400 (otlp_endpoint)" in caplog.text
    assert "6 more spans are lost; in all exported=1 lost=4 refused=2" in log_lines(caplog)
    made.turn(2.0)
    assert caplog.text.count("more spans are lost") == 1


def test_a_collector_that_is_busy_is_asked_again(started, caplog) -> None:
    caplog.set_level("INFO")
    made, scripted = export(started, 503, 429, 200)
    wait_until(lambda: made.exported == 3, "all that there was")
    assert made.refused == 0
    assert len(scripted.paths) >= 5
    assert "the collector does not take spans" in caplog.text
    assert "the collector takes spans again" in caplog.text


def test_the_end_waits_for_nobody_and_tells_what_is_left(started, caplog) -> None:
    made, scripted = export(started, 503)
    wait_until(lambda: bool(scripted.paths), "a first attempt")
    made.close(0.1)
    assert (made.exported, made.refused, made.lost) == (0, 0, 7)
    assert "7 more spans are lost; in all exported=0 lost=7 refused=0" in log_lines(caplog)


def test_what_the_sdk_sends_to_nobody_is_refused(caplog) -> None:
    class TooLarge:
        def __init__(self, url: str, **_: object) -> None: ...

        def export(self, _: object) -> None: ...

    stop = threading.Event()
    make: Any = collectors.Collector
    assert make("spans", "traces", TooLarge, Settings(), stop).send([]) is collectors.Fate.REFUSED
    assert "the collector was not asked" in caplog.text


def test_queues_are_as_opentelemetrys_variables_say(caplog) -> None:
    spans = [Span(name, "1" * 32, "2" * 16, "", 1, 2) for name in "abcd"]
    few = {"OTEL_BSP_MAX_QUEUE_SIZE": "3", "OTEL_BSP_SCHEDULE_DELAY": "1"}
    queue = queue_of_environment(few)
    queue.put(spans)
    assert (queue.dropped, len(queue.take())) == (1, 3)
    assert not caplog.records
    queue = queue_of_environment({"OTEL_BSP_MAX_QUEUE_SIZE": "0", "OTEL_BSP_SCHEDULE_DELAY": "1"})
    queue.put(spans)
    assert queue.dropped == 0
    (warned,) = caplog.records
    assert "OTEL_BSP_MAX_QUEUE_SIZE is not a whole number" in warned.getMessage()


def test_what_is_used_of_opentelemetrys_variables_is_logged(caplog) -> None:
    caplog.set_level("INFO")
    queue_of_environment({"OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "9", "OTEL_BSP_MAX_QUEUE_SIZE": "3"})
    warned, told = caplog.records
    assert warned.getMessage() == (
        "OTEL_BSP_MAX_EXPORT_BATCH_SIZE is more than OTEL_BSP_MAX_QUEUE_SIZE: "
        "batches have at most 3 spans"
    )
    assert getattr(told, ATTRIBUTE) == {"max_queue": 3, "max_batch": 3, "delay_s": 5.0}
