"""History of a real service: no data lost or counted twice, whichever process answers or dies."""

import json
import os
import re
import signal
import urllib.parse
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from shmserve.core.stats.counter_pages import BUCKETS
from tests.holding import metric
from tests.running_server import wait_until
from tests.servers import Server, served

MODELS = Path(__file__).parents[1] / "repositories" / "monitor"
GOOD = {"inputs": [{"name": "X", "shape": [3], "datatype": "FP32", "data": [1, 2, 6]}]}
BAD = {"inputs": [{"name": "X", "shape": [1], "datatype": "FP32", "data": [-1]}]}
WRONG = {"inputs": [{"name": "X", "shape": [4], "datatype": "FP32", "data": [1]}]}
SETTINGS: dict[str, Any] = {"http_workers": 2, "grpc_processes": 0}
calm = served(MODELS, **SETTINGS)


@pytest.fixture
def watched() -> Iterator[Server]:
    with Server(MODELS, **SETTINGS) as server:
        server.wait_instances()
        until(server, lambda d: d["until"] > 0, "the first second")
        yield server


def data(server: Server, query: str = "") -> Any:
    status, document = server.get(f"/monitor/data?{query}")
    assert status == 200, document
    return document


def series(server: Server, name: str) -> list[float]:
    """Empty: nothing is called so, yet."""
    path = f"/grps/v1/monitor/series?name={urllib.parse.quote(name)}"
    status, _, body = server.request("GET", path)
    assert status == 200
    return [] if body == b"key not found" else [value for _, value in json.loads(body)["data"]]


def answered(document: Any) -> int:
    """Return the number of answered requests over all seconds."""
    columns = [document["total"].get(f"bucket_{n}", []) for n in range(BUCKETS)]
    return sum(int(value or 0) for column in columns for value in column)


def failed(document: Any, why: str) -> int:
    """Return the number of requests reported as failed for this reason."""
    return sum(entry["count"] for entry in document["troubles"] if why in entry["text"])


def infer(server: Server, document: Any, times: int = 1) -> list[int]:
    return [server.infer("reports", document)[0] for _ in range(times)]


def until(server: Server, right: Callable[[Any], bool], what: str) -> Any:
    found: list[Any] = [None]

    def look() -> bool:
        status, found[0] = server.get("/monitor/data")
        return status == 200 and right(found[0])

    wait_until(look, what)
    return found[0]


def test_the_history_has_what_the_counters_have(
    watched: Server, threads: ThreadPoolExecutor
) -> None:
    list(threads.map(infer, [watched] * 3, [GOOD] * 3, [40] * 3))
    assert infer(watched, BAD, 5) == [500] * 5
    assert infer(watched, WRONG, 7) == [400] * 7
    until(watched, lambda d: answered(d) >= 120 and failed(d, "the model raised") >= 5, "requests")
    found = until(watched, lambda d: failed(d, "malformed") >= 7, "refused requests")
    counted = metric(watched, "shmserve_request_duration_seconds_count")
    assert answered(found) == counted == 120
    (model,) = found["models"]
    assert model["requests"] == metric(watched, "shmserve_requests_total") == 132
    assert model["failed"] == 12
    assert (model["state"], model["instances"]) == ("READY", 2)
    assert (failed(found, "the model raised"), failed(found, "malformed")) == (5, 7)
    texts = {entry["what"]: entry for entry in found["troubles"]}
    assert "reports/1" in texts
    assert all("/" not in entry["text"] for entry in found["troubles"])
    said = until(watched, lambda d: all(t.get("said") for t in d["troubles"]), "what was told")
    told_of = {entry["text"]: entry["said"] for entry in said["troubles"]}
    assert "1 elements" in told_of.pop("request refused: it was malformed or did not fit the model")
    (raised,) = told_of.values()
    assert "document.title" in raised, "the page puts it in as text"
    assert "/" not in raised
    proxied = watched.request("GET", "/monitor/data", headers={"Via": "1.1 proxy"})
    assert all("said" not in entry for entry in json.loads(proxied[2])["troubles"])
    rates = [value or 0.0 for value in found["total"]["failed"]]
    assert 0 < max(rates) <= 100
    latest = max(value or 0.0 for value in found["total"]["latency_max"])
    assert latest >= max(value or 0.0 for value in found["total"]["latency_avg"]) > 0
    qps = series(watched, "*qps")
    assert len(qps) == 174
    # a second measured short has a higher rate
    assert sum(qps) == pytest.approx(sum(value or 0.0 for value in found["total"]["requests"]))
    assert sum(qps) > 0
    assert found["processors"] == os.cpu_count()
    assert max(found["system"]["memory"]) > 1 << 20
    assert {row["role"] for row in found["processes"]} >= {"http", "executor", "coordinator"}


def test_who_answers_makes_no_difference(watched: Server) -> None:
    infer(watched, GOOD, 20)
    known = until(watched, lambda d: answered(d) == 20, "requests")
    (first, second) = watched.pids("http worker")[:2]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: first not in watched.pids("http worker"), "the worker's end")
    os.kill(second, signal.SIGKILL)
    wait_until(lambda: second not in watched.pids("http worker"), "the worker's end")
    wait_until(watched.ready, "new workers")
    watched.wait_linked()
    query = f"since={known['until']}&life={known['life']}"
    new = data(watched, query)
    assert new["life"] == known["life"]
    assert new["first"] == known["until"]
    again = until(watched, lambda d: "HTTP worker" in {t["what"] for t in d["troubles"]}, "ends")
    assert answered(again) == 20  # includes the counts of workers that have ended
    start = known["first"] - again["first"]
    before = known["total"]["requests"]
    assert again["total"]["requests"][start : start + len(before)] == before
    infer(watched, GOOD, 5)
    assert answered(until(watched, lambda d: answered(d) >= 25, "more requests")) == 25


def test_a_new_coordinator_begins_anew_and_counts_nothing_twice(watched: Server) -> None:
    infer(watched, GOOD, 30)
    known = until(watched, lambda d: answered(d) == 30, "requests")
    (pid,) = watched.pids("coordinator")
    os.kill(pid, signal.SIGKILL)
    infer(watched, GOOD, 1)  # meanwhile requests are answered
    new = until(watched, lambda d: d["life"] != known["life"], "a new history")
    watched.wait_linked()
    # workers hand over counters after linking
    until(watched, lambda d: [m["requests"] for m in d["models"]] == [31], "all counters")
    first = new["until"]
    new = until(
        watched, lambda d: d["until"] >= first + 2, "seconds with what was counted till now"
    )
    assert answered(new) <= 1
    infer(watched, GOOD, 5)
    found = until(watched, lambda d: answered(d) >= answered(new) + 5, "more requests")
    assert answered(found) == answered(new) + 5


def test_the_history_goes_on_after_a_restart_of_the_service(watched: Server) -> None:
    infer(watched, GOOD, 30)
    known = until(watched, lambda d: answered(d) == 30, "requests")
    watched.stop()
    watched.start()
    found = until(watched, lambda d: d["until"] >= known["until"], "the seconds before")
    assert found["life"] != known["life"]
    (model,) = found["models"]
    assert model["requests"] == 0, "counters are the new service's"
    hour = data(watched, "level=hour")
    assert answered(hour) == 30
    watched.stop()
    file = Path(watched.run_dir) / "history"
    file.write_bytes(file.read_bytes()[:-9])
    watched.start()
    until(watched, lambda d: d["until"] > 0, "a second of the new history")
    assert answered(data(watched, "level=hour")) == 0
    watched.wait_log("the history begins anew: its file in state_dir is unreadable: its end")


def test_an_executors_end_is_told_without_a_path(watched: Server) -> None:
    pid = watched.pids("executor reports")[0]
    os.kill(pid, signal.SIGKILL)
    found = until(
        watched,
        lambda d: any("SIGKILL" in entry["text"] for entry in d["troubles"]),
        "the executor's end",
    )
    (entry,) = [entry for entry in found["troubles"] if "SIGKILL" in entry["text"]]
    assert re.fullmatch(r"reports/1/[01]", entry["what"])
    assert entry["count"] == 1


def test_models_report_values_of_every_kind(calm: Server) -> None:
    names = {"mean": 3.0, "top": 6.0, "bottom": 1.0}
    until(calm, lambda d: d["until"] > 0, "the first second")
    # Requests of one second may be split over two reports, so check the last report
    infer(calm, GOOD, 8)
    wait_until(lambda: sum(series(calm, "sum")[-60:]) == 72, "all values")
    for name, value in names.items():
        assert value in [round(v, 3) for v in series(calm, name)], name
    assert all(v in (0.0, names["mean"]) for v in series(calm, "mean"))
    shown = {value["name"]: value for value in data(calm)["values"]}
    assert {name: value["kind"] for name, value in shown.items() if name in names} == {
        "mean": "avg",
        "top": "max",
        "bottom": "min",
    }
    assert 2.0 in shown["spread"]["series"]["p50"]
    assert 6.0 in shown["spread"]["series"]["p99"]
    assert len(series(calm, "spread")) == 20
    status, _, body = calm.request("GET", "/grps/v1/monitor/series?name=nope")
    assert (status, body) == (200, b"key not found")


def test_the_pages_files_travel_as_they_should(calm: Server) -> None:
    status, headers, page = calm.request("GET", "/")
    assert status == 200
    assert b"<main>" in page
    tag = headers["etag"]
    status, headers, body = calm.request("GET", "/", headers={"If-None-Match": tag})
    assert (status, body) == (304, b"")
    assert headers["etag"] == tag
    status, headers, _ = calm.request("HEAD", "/monitor/assets/page.js")
    assert status == 200
