"""The metrics page over HTTP: files, data, GRPS's series."""

import gzip
import json
import re
from importlib import resources
from typing import Any

import msgspec
import pytest

from shmserve.config import Settings
from shmserve.core.registry import ModelState
from shmserve.core.stats.aggregation import PERCENTS
from shmserve.core.stats.executor_counters import ExecutorCounts
from shmserve.core.stats.incidents import Incident
from shmserve.core.stats.request_counters import Reason, RequestCounts
from shmserve.core.stats.time_series import LEVELS, Column
from shmserve.errors import ConfigError
from shmserve.protocol.control.history_messages import (
    GpuHistory,
    HistoryReport,
    ModelHistory,
    ProcessUse,
    ValueHistory,
)
from shmserve.protocol.control.stats_messages import GpuReport, ModelReport, RegionsReport, Report
from shmserve.tensor.spec import EnsembleStep
from tests.unit.http_client import Client, error_of

ASSETS = (
    *("page.js", "charts.js", "plot.js", "ticks.js", "tables.js", "series.js", "format.js"),
    *("page.css", "icon.svg", "api.css", "api.js"),
)
GZIP = {"Accept-Encoding": "gzip, deflate, br"}
DISTRIBUTION = tuple(float(percent) for percent in PERCENTS)


def history(level: int = 0, points: int = 2, **fields: Any) -> HistoryReport:
    """Return `points` whole periods and the current period; values count up from 1."""
    cells: Column = [*(float(n) for n in range(1, points + 1)), 1000.0]
    values: dict[str, Any] = {
        "life": "l1",
        "level": level,
        "first": 5,
        "until": 5 + points,
        "running": True,
        "ended_at": 1000.0,
        "age_s": 7.0,
        "total": {"requests": cells, "failed": [None, *cells[1:]], "latency_max": cells},
        "system": {"cpu": cells, "memory_percent": cells},
        **fields,
    }
    return HistoryReport(**values)


def reported(model: str, name: str, kind: str, *cells: float | None, **more: Any) -> ValueHistory:
    return ValueHistory(model, "1", name, kind, {"value": list(cells)}, **more)


@pytest.fixture
def client():
    found = Client()
    found.dispatcher.coordinator.histories = {level: history(level) for level in range(len(LEVELS))}
    return found


def data(client: Client, query: str = "") -> Any:
    answer = client.get("/monitor/data", QUERY_STRING=query)
    assert answer.status == 200, answer.body
    return json.loads(answer.body)


def series(client: Client, name: str) -> Any:
    answer = client.get("/grps/v1/monitor/series", QUERY_STRING=f"name={name}")
    assert answer.status == 200
    return answer.json if answer.headers["content-type"] == "application/json" else answer.body


# ---------------------------------------------------------------------- files


@pytest.mark.parametrize("path", ["/", "/grps/v1/monitor/metrics", "/monitor/api"])
def test_a_page_names_only_files_that_are_there_wherever_it_is_seen(path: str) -> None:
    client = Client()
    page = client.get(path)
    assert page.status == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    depth = path.count("/") - 1
    found = re.findall(r'(?:src|href)="([^"]+)"', page.body.decode())
    assert len(found) >= 5
    for link in found:
        up = link.count("../")
        assert up == depth, link
        target = "/" + link.removeprefix("../" * up).removeprefix("./")
        if target not in ("/metrics", "/v2/models/stats"):
            assert client.get(target).status == 200, target


@pytest.mark.parametrize("path", ["/", "/monitor/api"])
def test_nothing_runs_inline_and_nothing_comes_from_elsewhere(path: str) -> None:
    client = Client()
    page = client.get(path)
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    text = page.body.decode()
    assert not re.search(r"<script(?![^>]*\bsrc=)|<style|\sstyle=|\son[a-z]+=|https?://", text)
    for name in ASSETS:
        code = client.get(f"/monitor/assets/{name}").body.decode().replace("www.w3.org", "")
        assert "innerHTML" not in code
        assert not re.search(r"https?://[a-z]", code.replace("http:///2000", "")), name


@pytest.mark.parametrize("name", ASSETS)
def test_a_file_is_sent_small_and_once(name: str) -> None:
    client = Client()
    path = f"/monitor/assets/{name}"
    plain, small = client.get(path), client.get(path, headers=GZIP)
    assert "content-encoding" not in plain.headers
    assert small.headers["content-encoding"] == "gzip"
    assert gzip.decompress(small.body) == plain.body
    assert small.headers["vary"] == "Accept-Encoding"
    tag = plain.headers["etag"]
    for condition in (tag, f"W/{tag}", "*", f'"other", {tag}'):
        again = client.get(path, headers={"If-None-Match": condition})
        assert (again.status, again.body) == (304, b""), condition
        assert again.headers["etag"] == tag
    assert client.get(path, headers={"If-None-Match": '"other"'}).status == 200
    assert client.get(path, headers={"Accept-Encoding": "gzip;q=0"}).body == plain.body


def test_these_are_all_files() -> None:
    folder = resources.files("shmserve.frontends.http").joinpath("static")
    assert {entry.name for entry in folder.iterdir()} == {"page.html", "api.html", *ASSETS}


@pytest.mark.parametrize("name", ["page.html", "api.html", "nope.js", "..", ""])
def test_there_are_no_other_files(name: str) -> None:
    assert Client().get(f"/monitor/assets/{name}").status == 404


def test_without_dashboard_there_is_none_of_it() -> None:
    client = Client(Settings(dashboard=False))
    for path in (
        "/",
        "/monitor/api",
        "/monitor/data",
        "/monitor/assets/page.js",
        "/grps/v1/monitor/series",
    ):
        assert client.get(path).status == 404, path
    assert client.get("/metrics").status == 200


def test_it_all_belongs_to_the_statistics() -> None:
    client = Client(Settings(http_restricted_api=("statistics:x-key=secret",)))
    client.dispatcher.coordinator.histories = {0: history()}
    paths = ("/", "/monitor/api", "/monitor/data", "/monitor/assets/page.js")
    for path in (*paths, "/grps/v1/monitor/metrics", "/grps/v1/monitor/series"):
        assert client.get(path).status == 403, path
        assert client.get(path, headers={"x-key": "secret"}).status == 200, path
    with pytest.raises(ConfigError):
        Client(Settings(http_restricted_api=("dashboard:x-key=secret",)))


# ----------------------------------------------------------------------- data


def test_what_a_browser_has_is_not_asked_for_again(client: Client) -> None:
    data(client, "level=minute&since=6&life=l1")
    data(client)
    assert client.dispatcher.coordinator.asked == [(1, 6, "l1", False), (0, 0, "", False)]


@pytest.mark.parametrize(
    ("query", "text"),
    [
        ("level=week", "level 'week' is none of second, minute, hour, day"),
        ("since=-1", "since must be the number of a period"),
        ("since=1e3", "since must be the number of a period"),
        ("since=" + "1" * 16, "since must be the number of a period"),
        ("life=" + "x" * 129, "life is longer than 128 characters"),
    ],
)
def test_a_bad_question_is_told_so(client: Client, query: str, text: str) -> None:
    assert error_of(client.get("/monitor/data", QUERY_STRING=query), 400) == text


def test_while_the_coordinator_is_away_that_is_said() -> None:
    client = Client()
    assert "coordinator" in error_of(client.get("/monitor/data"), 503)
    assert client.get("/").status == 200


def test_every_model_has_a_row(client: Client) -> None:
    dispatcher = client.dispatcher
    spec = dispatcher.entries["identity"]["1"].spec
    dispatcher.put(spec, ModelState.READY)
    step = EnsembleStep("identity", "", {"INPUT0": "IN"}, {"OUTPUT0": "OUT"})
    whole = msgspec.structs.replace(spec, name="whole", platform="ensemble", steps=(step,))
    dispatcher.put(whole, ModelState.READY)
    dispatcher.refused_models = {"broken": "config.pbtxt: line 3", "identity/9": "no such file"}
    columns: dict[str, Column] = {"requests": [1.0]}
    failures = [0] * len(Reason)
    failures[Reason.BAD_REQUEST] = failures[Reason.MODEL] = 2
    counted = RequestCounts(10, 0, 0, failures)
    dispatcher.coordinator.histories[0] = history(
        models=(ModelHistory("identity", "1", columns), ModelHistory("gone", "4", columns)),
        report=Report(
            (ModelReport("identity", "1", ExecutorCounts(), {"http": counted, "grpc": counted}),),
            (),
            {"http": 3},
            {"http": 1},
            pool_bytes=77,
            regions=(RegionsReport("system", 2, 8192, 1),),
        ),
        processes=(ProcessUse("http", "", 3.5, 1.5, 1 << 20),),
        incidents=(Incident(1.0, 2.0, "a/1", "x", 3), Incident(4.0, 5.0, "b/1", "y", 1)),
    )
    found = data(client)
    rows = {(row["name"], row["version"]): row for row in found["models"]}
    assert rows["broken", ""]["reason"] == "config.pbtxt: line 3"
    assert rows["identity", "9"]["state"] == "UNAVAILABLE"
    assert rows["gone", "4"]["state"] == "UNLOADED"
    row = rows["identity", "1"]
    assert (row["state"], row["instances"]) == ("READY", 1)
    assert rows["whole", "1"]["instances"] is None, "those of its steps are not its own"
    assert (row["requests"], row["failed"], row["series"]) == (28, 8, {"requests": [1.0]})
    assert (found["starts"], found["ends"], found["pool_bytes"]) == ({"http": 3}, {"http": 1}, 77)
    assert found["regions"] == [{"kind": "system", "regions": 2, "nbytes": 8192, "quarantined": 1}]
    assert [entry["what"] for entry in found["troubles"]] == ["b/1", "a/1"]
    assert found["processes"][0]["private_bytes"] == 1 << 20
    assert found["total"]["failed"] == [None, 2.0, 1000.0]
    assert found["server"]["state"] == "ready"


def gpu(index: int, *cells: float | None) -> GpuHistory:
    columns = {"utilization": list(cells), "memory": [c and c * (1 << 20) for c in cells]}
    return GpuHistory(f"GPU-{index}", index, "H200", columns)


def test_gpus_have_series_and_what_they_have_if_they_answer(client: Client) -> None:
    assert data(client)["gpus"] == []
    answering = GpuReport("GPU-0", 0, "H200", memory_total=99, power_limit=700.0)
    client.dispatcher.coordinator.histories[0] = history(
        gpus=(gpu(0, 1.0), gpu(1, None)), report=Report((), (), {}, {}, gpus=(answering,))
    )
    first, second = data(client)["gpus"]
    assert (first["uuid"], first["index"], first["name"]) == ("GPU-0", 0, "H200")
    assert first["series"]["utilization"] == [1.0]
    assert (first["memory_total"], first["power_limit"]) == (99, 700.0)
    assert (second["memory_total"], second["power_limit"]) == (None, None)


def test_a_server_that_has_published_nothing_is_starting(client: Client) -> None:
    client.dispatcher.published = False
    found = data(client)
    assert (found["server"]["state"], found["models"]) == ("starting", [])


def test_data_is_sent_small_but_never_kept(client: Client) -> None:
    client.dispatcher.coordinator.histories[0] = history(points=60)
    small = client.get("/monitor/data", headers=GZIP)
    assert small.headers["cache-control"] == "no-store"
    assert small.headers["content-encoding"] == "gzip"
    assert json.loads(gzip.decompress(small.body))["points"] == 60


# ------------------------------------------------------------- GRPS's series


@pytest.mark.parametrize(
    "name", ["*qps", "*fail_rate(%25)", "*latency_max(ms)", "*cpu_usage(%25)", "*mem_usage(%25)"]
)
def test_a_trend_has_all_times_oldest_first(client: Client, name: str) -> None:
    found = series(client, name)
    assert found["label"] == "trend"
    assert [index for index, _ in found["data"]] == list(range(174))
    values = [value for _, value in found["data"]]
    at = 0
    for points in (30, 24, 60, 60):
        first = 0.0 if name.startswith("*fail") else 1.0  # a series without a value shows as 0
        assert values[at : at + points] == [0.0] * (points - 2) + [first, 2.0]
        at += points


def test_a_distribution_is_numbered_as_grps_does(client: Client) -> None:
    client.dispatcher.coordinator.histories[0] = history(latest=DISTRIBUTION)
    found = series(client, "*latency_cdf(ms)")
    assert found["label"] == "cdf"
    numbers = [*range(10, 91, 10), *range(91, 102)]
    assert found["data"] == [list(pair) for pair in zip(numbers, DISTRIBUTION, strict=True)]
    client.dispatcher.coordinator.histories[0] = history()
    assert {value for _, value in series(client, "*latency_cdf(ms)")["data"]} == {0.0}


@pytest.mark.parametrize(
    ("kind", "together"), [("avg", 3.0), ("max", 4.0), ("min", 2.0), ("inc", 6.0)]
)
def test_a_name_of_several_models_is_one(client: Client, kind: str, together: float) -> None:
    for level in range(len(LEVELS)):
        both = (
            reported("a", "hits", kind, None, 2.0, 9.0),
            reported("b", "hits", kind, None, 4.0, 9.0),
            reported("c", "misses", kind, 7.0, 7.0, 9.0),
        )
        client.dispatcher.coordinator.histories[level] = history(level, values=both)
    values = [value for _, value in series(client, "hits")["data"]]
    assert values[-2:] == [0.0, together]


def test_a_reported_distribution_is_one_too(client: Client) -> None:
    silent = reported("a", "cost", "cdf")
    value = reported("b", "cost", "cdf", latest=DISTRIBUTION)
    client.dispatcher.coordinator.histories[0] = history(values=(silent, value))
    assert series(client, "cost")["data"][-1] == [101, 99.99]


@pytest.mark.parametrize(
    ("name", "values"), [("*gpu1_usage(%25)", [0.0, 30.0]), ("*gpu10_mem_usage(MIB)", [512.0, 0.5])]
)
def test_a_gpu_is_named_by_its_number(client: Client, name: str, values: list[float]) -> None:
    for level in range(len(LEVELS)):
        both = (gpu(1, None, 30.0, 99.0), gpu(10, 512.0, 0.5, 99.0))
        client.dispatcher.coordinator.histories[level] = history(level, gpus=both)
    assert [value for _, value in series(client, name)["data"]][-2:] == values


@pytest.mark.parametrize("name", ["", "nope", "*nope", "*gpu0_usage(%25)", "*gpu_usage(%25)"])
def test_an_unknown_name_is_told_as_grps_tells_it(client: Client, name: str) -> None:
    assert series(client, name) == b"key not found"


def test_series_ask_for_no_more_than_they_need(client: Client) -> None:
    series(client, "*qps")
    assert {brief for *_, brief in client.dispatcher.coordinator.asked} == {True}
