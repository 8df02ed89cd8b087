"""Command ``shmserve measure``: sends requests to a model over each transport, and times them.

The client takes processor time from a server on the same host, so only compare figures of one
machine.
"""

import argparse
import functools
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from shmserve import config
from shmserve.cli.measuring import load_plan, load_run, measured_doors
from shmserve.cli.measuring.chart import Series, line_chart
from shmserve.cli.measuring.door import Door
from shmserve.cli.measuring.measurement import Measurement
from shmserve.cli.measuring.model_inputs import made_inputs
from shmserve.cli.operating import server_address
from shmserve.cli.operating.server_address import Asking
from shmserve.cli.operating.show import Row, table
from shmserve.client.wire.credentials import Credentials
from shmserve.command_line import DOORS
from shmserve.errors import ConfigError, ShmserveError, Unavailable
from shmserve.protocol.decoding import json_decoder

_decode = json_decoder(dict[str, Any])
_ASK_S = 10.0
_POINTS = 60  # of a line in the chart
_MOST = {"seconds": 3600.0, "requests": 10_000_000, "rate": 100_000.0}
_MOST_WARM_UP_S = 600.0
_MOST_CALLERS = 256
_CALLERS = {False: "1", True: "16"}  # by default; True: with planned starts
_BUSY_CLIENT = 0.8  # of a processor
_IN_REMARKS = ("client_cpu", "errors", "stable", "knee")  # of the table: lines below say the same


def main(arguments: argparse.Namespace) -> int:
    """Measure and print. Return exit status 1 if any request or requested transport failed."""
    levels = _checked(arguments)
    settings = config.load()
    url = server_address.http(settings, arguments.url)
    credentials = server_address.credentials(arguments)
    inputs, streamed = _described(url, credentials, arguments)
    results = []
    for over in dict.fromkeys(arguments.over or _usual(streamed)):
        places = (over, url, credentials, settings, arguments, inputs, streamed)
        maker = functools.partial(measured_doors.maker, *places)
        nbytes = sum(map(measured_doors.nbytes, inputs.values()))
        for level in levels:
            result = Measurement(over, level, bool(arguments.rate), streamed, nbytes)
            results.append(_measured(result, maker, arguments))
    knees = _knees(results)
    rows = [result.row() for result in results]
    for row in rows if len(levels) > 1 else ():
        row["knee"] = knees.get(row["over"]) == row["concurrency"]
    if arguments.json:
        print(msgspec.json.encode(rows).decode())
    else:
        print(table([{k: v for k, v in row.items() if k not in _IN_REMARKS} for row in rows]))
        print("".join(f"{line}\n" for line in remarks(rows)), end="")
    if arguments.svg:
        draw(arguments, results, knees)
    return 1 if any(row["error"] or row["errors"] for row in rows) else 0


def _checked(arguments: argparse.Namespace) -> list[int]:
    """Return the levels of concurrency. Raise ConfigError for an argument outside its bounds."""
    for name, limit in _MOST.items():
        value = getattr(arguments, name)
        if value is not None and not 0 < value <= limit:
            raise ConfigError(f"--{name}: must be more than 0 and at most {limit:g}")
    if not 0 <= arguments.warm_up <= _MOST_WARM_UP_S:
        raise ConfigError(f"--warm-up: must be at least 0 and at most {_MOST_WARM_UP_S:g}")
    if arguments.poisson and not arguments.rate:
        raise ConfigError("--poisson: give --rate as well")
    callers = arguments.concurrency or _CALLERS[bool(arguments.rate)]
    return load_plan.levels(callers, _MOST_CALLERS)


def _usual(streamed: bool) -> list[str]:
    """Return the transports to measure by default: a decoupled model has no `region`."""
    return [over for over in DOORS if not streamed or over != "region"]


def _described(
    url: str, credentials: Credentials, arguments: argparse.Namespace
) -> tuple[dict[str, Any], bool]:
    """Return the inputs to send, and whether the model is decoupled."""
    path = f"/v2/models/{urllib.parse.quote(arguments.model, safe='')}"
    with Asking(url, credentials, _ASK_S) as server:
        answers = []
        for page in (path, f"{path}/config"):
            status, error, body = server.ask("GET", page)
            if status != 200:
                raise Unavailable(f"{arguments.model}: {error}")
            answers.append(_decode(body))
    metadata, configuration = answers
    batch = arguments.batch if configuration.get("max_batch_size") else None
    streamed = bool((configuration.get("model_transaction_policy") or {}).get("decoupled"))
    return made_inputs(metadata["inputs"], arguments.input, batch, arguments.size), streamed


def _measured(
    result: Measurement, maker: Callable[[], Callable[[], Door]], arguments: argparse.Namespace
) -> Measurement:
    planned = None
    if arguments.rate:
        planned = load_plan.arrivals(arguments.rate, arguments.poisson, -arguments.warm_up)
    limits = (arguments.seconds, arguments.requests, arguments.warm_up)
    try:
        load_run.run(result, maker(), planned, *limits)
    except ShmserveError as ex:
        result.give_up(ex.message)
    return result


def _knees(results: Sequence[Measurement]) -> dict[str, int | None]:
    """Return the knee of each transport."""
    rates: dict[str, list[tuple[int, float]]] = {}
    for result in results:
        if result.samples:
            rates.setdefault(result.over, []).append((result.concurrency, result.per_s))
    return {over: load_plan.knee(levels) for over, levels in rates.items()}


def remarks(rows: Sequence[Row]) -> list[str]:
    """Return lines about failures, late starts, unstable rates, and knees."""
    lines = []
    for row in rows:
        place = f"{row['over']} at {row['concurrency']}"
        for error in row["errors"]:
            status = error["status"] or "no status"
            lines.append(f"{place}: {error['count']} failed, {status}: {error['text']}")
        if row.get("late") or row.get("unsent"):
            late = f"{row['late']} requests started late, at most {row['max_late_ms']} ms"
            lines.append(
                f"{place}: {late}, and {row['unsent']} did not start: all callers were waiting for"
                " answers (--concurrency), or the host is busy"
            )
        if row.get("client_cpu", 0.0) >= _BUSY_CLIENT:
            lines.append(
                f"{place}: the client used {row['client_cpu']:.0%} of a processor, and this command"
                " uses one: the server can do more; run several at once, and add their rates"
            )
    if shaky := [f"{r['over']} at {r['concurrency']}" for r in rows if r.get("stable") is False]:
        lines.append(
            f"not stable: {', '.join(shaky)}: rates of thirds of the time differ by more than 10 %"
            " from their mean; measure longer (--seconds), on an idle host"
        )
    for over in dict.fromkeys(row["over"] for row in rows if "knee" in row):
        levels = [row for row in rows if row["over"] == over]
        knee = next((row for row in levels if row["knee"]), None)
        found = f"knee at {knee['concurrency']}" if knee else "no knee"
        until = "up to there" if knee else f"up to {levels[-1]['concurrency']}"
        lines.append(f"{over}: {found}: {until} the rate grows by at least 10 % per doubling")
    return lines


def draw(
    arguments: argparse.Namespace,
    results: Sequence[Measurement],
    knees: Mapping[str, int | None],
) -> None:
    """Draw medians and rates over time or, for several levels, by concurrency. Raise ConfigError if
    the file cannot be written."""
    measured = [result for result in results if result.samples]
    levels = sorted({result.concurrency for result in results})
    if len(levels) > 1:
        places = {level: float(n) for n, level in enumerate(levels)}
        drawing = line_chart(
            f"{arguments.model}, knees circled",
            _by_level(measured, places),
            "requests at a time",
            [(place, str(level)) for level, place in places.items()],
            {over: places[level] for over, level in knees.items() if level is not None},
        )
    else:
        drawing = line_chart(f"{arguments.model}, {levels[0]} at a time", _over_time(measured))
    try:
        Path(arguments.svg).write_text(drawing)
    except OSError as ex:
        raise ConfigError(f"--svg: {arguments.svg} cannot be written: {ex.strerror}") from None


def _by_level(results: Sequence[Measurement], places: Mapping[int, float]) -> dict[str, Series]:
    rates: dict[str, list[tuple[float, float]]] = {}
    slow: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        place = places[result.concurrency]
        rates.setdefault(result.over, []).append((place, result.per_s))
        latencies = [sample.latency_ms for sample in result.samples]
        slow.setdefault(result.over, []).append((place, float(np.percentile(latencies, 99))))
    return {"requests per second": rates, "latency, 99th percentile, ms": slow}


def _over_time(results: Sequence[Measurement]) -> dict[str, Series]:
    median: dict[str, list[tuple[float, float]]] = {}
    rates: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        width = max(result.elapsed_s / _POINTS, 1e-3)
        bins: dict[int, list[float]] = {}
        for sample in result.samples:
            bins.setdefault(int(sample.end_s / width), []).append(sample.latency_ms)
        times = [((number + 0.5) * width, latencies) for number, latencies in sorted(bins.items())]
        median[result.over] = [(at, float(np.median(latencies))) for at, latencies in times]
        rates[result.over] = [
            ((number + 0.5) * width, len(bins.get(number, ())) / width)
            for number in range(max(bins) + 1)
        ]
    return {"latency, median, ms": median, "requests per second": rates}
