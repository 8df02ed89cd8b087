"""Command ``shmserve measure``: sends requests to a model over each transport in a closed loop,
and times them.

The client is written in Python and shares the host with the server, so only compare figures of one
machine.
"""

import argparse
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from html import escape
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct

from shmserve import config
from shmserve.cli.measuring import measured_doors
from shmserve.cli.measuring.measured_doors import Door, Receipt
from shmserve.cli.operating import server_address
from shmserve.cli.operating.server_address import Asking
from shmserve.cli.operating.show import Row, table
from shmserve.client.wire.credentials import Credentials
from shmserve.errors import ConfigError, ShmserveError, Unavailable
from shmserve.protocol.decoding import json_decoder
from shmserve.tensor import dtypes

_decode = json_decoder(dict[str, Any])
_ASK_S = 10.0
_WARM_UP = 5  # requests that open connections, map memory and learn output sizes
_MOST_FAILED = 20  # failures after which a transport is given up
_POINTS = 60  # of a line in the chart
_MOST = {"seconds": 3600.0, "requests": 10_000_000, "concurrency": 256}
Series = Mapping[str, Sequence[tuple[float, float]]]  # line name -> (seconds, value)

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 720, 150, 70, 30, 45  # of a panel, in pixels
_COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#7f7f7f", "#e377c2")
Array = np.ndarray[Any, Any]

_SEED = 1
_MOST_BYTES = 1 << 30


class Measurement(Struct):
    """Measurement of a transport. `ends`: for each successful request, the end in seconds from the
    start, and the latency in ms. `failures`: reasons of failed requests. `error`: reason why the
    transport cannot be used."""

    over: str
    elapsed_s: float = 0.0
    failures: list[str] = []
    error: str = ""
    receipt: Receipt = {}
    ends: list[tuple[float, float]] = []

    def warm_up(self, receipt: Receipt) -> None:
        """Take in the receipt of a request that is not measured."""
        self.receipt = receipt

    def finish(self, elapsed_s: float) -> None:
        self.elapsed_s = elapsed_s
        self.ends.sort()

    def give_up(self, error: str) -> None:
        self.error = error

    def row(self) -> Row:
        """Return the row to print. Percentiles cover successful requests."""
        row: Row = {"over": self.over, "requests": len(self.ends), "failed": len(self.failures)}
        if self.ends:
            ms = np.array([latency for _, latency in self.ends])
            row["per_s"] = round(len(self.ends) / self.elapsed_s, 1)
            for percent in (50, 90, 99):
                row[f"p{percent}_ms"] = round(float(np.percentile(ms, percent)), 3)
            row["max_ms"] = round(float(ms.max()), 3)
        copied = self.receipt.get("copied_bytes", {})
        row["copied_bytes"] = " ".join(f"{stage}={n}" for stage, n in copied.items() if n) or (
            "0" if copied else ""
        )
        row["error"] = self.error or (self.failures[-1] if self.failures else "")
        return row


def main(arguments: argparse.Namespace) -> int:
    """Measure and print. Return exit status 1 if any request or requested transport failed."""
    for name, limit in _MOST.items():
        if not 0 < getattr(arguments, name) <= limit:
            raise ConfigError(f"--{name}: must be more than 0 and at most {limit:g}")
    settings = config.load()
    url = server_address.http(settings, arguments.url)
    credentials = server_address.credentials(arguments)
    inputs = _inputs(url, credentials, arguments)
    results = []
    for over in dict.fromkeys(arguments.over):
        result = Measurement(over)
        try:
            make = measured_doors.maker(over, url, credentials, settings, arguments, inputs)
            run(result, make, arguments)
        except ShmserveError as ex:
            result.give_up(ex.message)
        results.append(result)
    rows = [result.row() for result in results]
    print(msgspec.json.encode(rows).decode() if arguments.json else table(rows))
    if arguments.svg:
        draw(arguments, results)
    return 1 if any(row["error"] for row in rows) else 0


def _inputs(url: str, credentials: Credentials, arguments: argparse.Namespace) -> dict[str, Any]:
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
    return made_inputs(metadata["inputs"], arguments.input, batch, arguments.size)


def run(result: Measurement, make: Callable[[], Door], limits: argparse.Namespace) -> None:
    """Run `limits.concurrency` concurrent callers, each with a separate door, until the first limit
    is reached. Raise ShmserveError if a door cannot be opened, or its warm-up requests fail."""
    with ExitStack() as stack:
        doors = [stack.enter_context(make()) for _ in range(limits.concurrency)]
        for door in doors:
            for _ in range(_WARM_UP):
                result.warm_up(door.send(receipt=True))
        counts = _shares(limits.requests, len(doors))
        start = time.perf_counter()
        callers = [
            threading.Thread(target=_call, args=(result, door, count, start, limits.seconds))
            for door, count in zip(doors, counts, strict=True)
            if count
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        result.finish(time.perf_counter() - start)


def _shares(total: int, parts: int) -> list[int]:
    return [total // parts + (1 if n < total % parts else 0) for n in range(parts)]


def _call(result: Measurement, door: Door, count: int, start: float, seconds: float) -> None:
    clock = time.perf_counter
    for _ in range(count):
        begun = clock()
        if begun - start > seconds or len(result.failures) >= _MOST_FAILED:
            return
        try:
            door.send()
        except ShmserveError as ex:
            result.failures.append(ex.message)
            continue
        ended = clock()
        result.ends.append((ended - start, (ended - begun) * 1e3))


def draw(arguments: argparse.Namespace, results: Sequence[Measurement]) -> None:
    """Draw medians and rates over time. Raise ConfigError if the file cannot be written."""
    median: dict[str, list[tuple[float, float]]] = {}
    rates: dict[str, list[tuple[float, float]]] = {}
    for result in results:
        if not result.ends:
            continue
        width = max(result.elapsed_s / _POINTS, 1e-3)
        bins: dict[int, list[float]] = {}
        for end, latency in result.ends:
            bins.setdefault(int(end / width), []).append(latency)
        times = [((number + 0.5) * width, latencies) for number, latencies in sorted(bins.items())]
        median[result.over] = [(at, float(np.median(latencies))) for at, latencies in times]
        rates[result.over] = [(at, len(latencies) / width) for at, latencies in times]
    title = f"{arguments.model}, {arguments.concurrency} at a time"
    drawing = line_chart(title, {"median latency, ms": median, "requests per second": rates})
    try:
        Path(arguments.svg).write_text(drawing)
    except OSError as ex:
        raise ConfigError(f"--svg: {arguments.svg} cannot be written: {ex.strerror}") from None


def line_chart(title: str, panels: Mapping[str, Series]) -> str:
    """Return the SVG document. Panels share the time axis, and have separate scales from 0."""
    names = list(dict.fromkeys(name for series in panels.values() for name in series))
    colours = {name: _COLOURS[n % len(_COLOURS)] for n, name in enumerate(names)}
    end = max((t for s in panels.values() for line in s.values() for t, _ in line), default=1.0)
    parts, top = [_text(_LEFT, 18, title, 14)], _TOP + 20
    for n, name in enumerate(names):
        parts.append(_text(_LEFT + 100 * n, _TOP + 8, name, 11, colours[name]))
    for label, series in panels.items():
        parts += _panel(label, series, colours, top, end or 1.0)
        top += _HEIGHT + _GAP
    size = f'width="{_LEFT + _WIDTH + 20}" height="{top}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif">'
    white = '<rect width="100%" height="100%" fill="white"/>'
    return "\n".join([head, white, *parts, "</svg>", ""])


def _panel(
    label: str, series: Series, colours: Mapping[str, str], top: int, end: float
) -> list[str]:
    maximum = max((v for line in series.values() for _, v in line), default=0.0) or 1.0
    bottom = top + _HEIGHT
    parts = [
        f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" fill="none"'
        ' stroke="#999"/>',
        _text(_LEFT, top - 5, label, 11),
        _text(5, top + 10, f"{maximum:.4g}", 11),
        _text(5, bottom, "0", 11),
        _text(_LEFT + _WIDTH - 40, bottom + 15, f"{end:.0f} s", 11),
    ]
    for name, line in series.items():
        points = " ".join(
            f"{_LEFT + _WIDTH * t / end:.1f},{bottom - _HEIGHT * v / maximum:.1f}" for t, v in line
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colours[name]}" stroke-width="1.5"/>'
        )
    return parts


def _text(x: int, y: int, text: str, size: int, colour: str = "black") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}">{escape(text)}</text>'


def made_inputs(
    metadata: Sequence[Mapping[str, Any]], files: Sequence[str], batch: int | None, size: int
) -> dict[str, Array]:
    """Return input arrays by name. Generated floats are in [0, 1), integers 0 or 1, texts 8 bytes
    long. Every run generates equal values.

    Args:
        metadata: inputs of the model, with `name`, `datatype` and `shape`.
        files: NAME=FILE.npy for inputs to read from files.
        batch: number of rows, if the model's first dimension is the batch; None: no batch
            dimension.
        size: size of other variable dimensions.

    Raises:
        ConfigError: a file cannot be used, the model has no such input, or an input is too large.
    """
    given = dict(_read(text) for text in files)
    names = [str(tensor["name"]) for tensor in metadata]
    for name in given.keys() - set(names):
        raise ConfigError(
            f"--input: the model has no input '{name}'; its inputs are {', '.join(names)}"
        )
    generator = np.random.default_rng(_SEED)
    return {
        name: given[name] if name in given else _made(tensor, batch, size, generator)
        for name, tensor in zip(names, metadata, strict=True)
    }


def _read(text: str) -> tuple[str, Array]:
    name, separator, path = text.partition("=")
    if not separator or not name:
        raise ConfigError(f"--input: '{text}' is not NAME=FILE.npy")
    try:
        return name, np.load(path, allow_pickle=False)
    except (OSError, ValueError) as ex:
        raise ConfigError(f"--input {name}: {path} is no .npy file: {ex}") from None


def _made(
    tensor: Mapping[str, Any], batch: int | None, size: int, generator: np.random.Generator
) -> Array:
    shape = [size if dim < 0 else int(dim) for dim in tensor["shape"]]
    if batch is not None and shape:
        shape[0] = batch
    datatype = dtypes.DATATYPES[str(tensor["datatype"])]
    count = 1
    for dim in shape:
        count *= dim
    if count * (datatype.itemsize or 12) > _MOST_BYTES:
        raise ConfigError(f"input '{tensor['name']}' would be larger than 1 GiB; give --input")
    if not datatype.itemsize:
        return np.full(shape, b"shmserve", object)
    if datatype.numpy.kind in "iub":
        return generator.integers(0, 2, shape).astype(datatype.numpy)
    return generator.random(shape).astype(datatype.numpy)
