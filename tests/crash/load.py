"""Clients that loop, and judge every answer: right, a clean 503, or a closed connection."""

from __future__ import annotations

import http.client
import json
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

import shmserve.client
from shmserve.testing.running_server import RunningServer

SIZES = (10, 1000, 300_000)  # floats; the last ones take a segment of their own
# Models, what each adds, and whether an input is a row of a batch.
ALONE = (("echo", 0, False), ("pair", 1, False))
WITH_BATCHES = (*ALONE, ("gathered", 1, True))


@dataclass
class Verdict:
    """What the clients saw; `wrong` must stay empty."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # s between two right answers of a client


def request_of(model: str, array: np.ndarray, name: str = "IN") -> tuple[bytes, dict[str, str]]:
    """Body and headers of a binary request."""
    head = {
        "inputs": [
            {
                "name": name,
                "shape": list(array.shape),
                "datatype": "FP32",
                "parameters": {"binary_data_size": array.nbytes},
            }
        ],
        "parameters": {"binary_data_output": True},
    }
    text = json.dumps(head).encode()
    return text + array.tobytes(), {"Inference-Header-Content-Length": str(len(text))}


def outputs_of(body: bytes, header_length: int) -> dict[str, bytes]:
    head = json.loads(body[:header_length])
    at = header_length
    found: dict[str, bytes] = {}
    for output in head["outputs"]:
        size = output["parameters"]["binary_data_size"]
        found[output["name"]] = body[at : at + size]
        at += size
    assert at == len(body), "length of the body"
    return found


class Client(threading.Thread):
    """One connection that sends numbered tensors and checks what comes back."""

    def __init__(
        self, server: RunningServer, number: int, stop: threading.Event, verdict: Verdict,
        sizes: tuple[int, ...], models: tuple[tuple[str, int, bool], ...],
    ) -> None:  # fmt: skip
        super().__init__(daemon=True)
        self.server = server
        self.number = number
        self.stop = stop
        self.verdict = verdict
        self.sizes = sizes
        self.models = models
        self.connection: http.client.HTTPConnection | None = None

    def run(self) -> None:
        count = 0
        last = time.monotonic()
        while not self.stop.is_set():
            count += 1
            kind = self._once(count)
            self.verdict.counts[kind] += 1
            if kind == "right":
                now = time.monotonic()
                self.verdict.gaps.append(now - last)
                last = now
            else:
                time.sleep(0.005)
        if self.connection is not None:
            self.connection.close()

    def _once(self, count: int) -> str:
        model, plus, is_row = self.models[count % len(self.models)]
        size = self.sizes[count // len(self.models) % len(self.sizes)]
        shape = (1, size) if is_row else (size,)
        array = np.full(shape, self.number * 100_000 + count % 9973, np.float32)
        body, headers = request_of(model, array)
        try:
            if self.connection is None:
                self.connection = http.client.HTTPConnection(
                    self.server.http_host, self.server.http_port, timeout=30
                )
            self.connection.request("POST", f"/v2/models/{model}/infer", body, headers)
            answer = self.connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as ex:
            self.verdict.closed.append(repr(ex))
            if self.connection is not None:
                self.connection.close()
            self.connection = None
            return "closed"
        if answer.status == 503:
            reason = json.loads(data).get("error")
            self.verdict.refused.append(reason)
            return "503" if reason else self._wrong("503 without a reason")
        if answer.status != 200:
            return self._wrong(f"{answer.status} {data[:200]!r}")
        length = int(answer.headers["Inference-Header-Content-Length"])
        got = outputs_of(data, length)["OUT"]
        if got != (array + plus).tobytes():
            first = struct.unpack("<f", got[:4])[0] if len(got) >= 4 else None
            return self._wrong(f"foreign content: wanted {array.flat[0] + plus}, got {first}")
        return "right"

    def _wrong(self, what: str) -> str:
        self.verdict.wrong.append(what)
        return "wrong"


class LaneClient(threading.Thread):
    """A program that talks to executors over lanes, and over HTTP where there are none."""

    def __init__(
        self, server: RunningServer, number: int, stop: threading.Event, verdict: Verdict,
        sizes: tuple[int, ...], models: tuple[tuple[str, int, bool], ...],
    ) -> None:  # fmt: skip
        super().__init__(daemon=True)
        self.models = models
        self.server = server
        self.number = number
        self.stop = stop
        self.verdict = verdict
        self.sizes = sizes

    def run(self) -> None:
        url = f"unix:{self.server.unix_path}"
        with shmserve.client.connect(url, timeout=30) as client:
            count = 0
            while not self.stop.is_set():
                count += 1
                self.verdict.counts[self._once(client, count)] += 1

    def _once(self, client: shmserve.client.Client, count: int) -> str:
        model, plus, is_row = self.models[count % len(self.models)]
        size = self.sizes[count // len(self.models) % len(self.sizes)]
        shape = (1, size) if is_row else (size,)
        array = np.full(shape, self.number * 100_000 + count % 9973, np.float32)
        try:
            result = client.infer(model, {"IN": array})
        except shmserve.client.InferenceError as ex:
            time.sleep(0.005)
            if ex.status in (0, 503):
                kept = self.verdict.refused if ex.status else self.verdict.closed
                kept.append(ex.message)
                return "lane 503"
            self.verdict.wrong.append(f"over a lane: {ex.status} {ex.message}")
            return "wrong"
        if not np.array_equal(result["OUT"], array + plus):
            self.verdict.wrong.append(f"over a lane: wanted {array.flat[0] + plus}")
            return "wrong"
        return f"over {result.transport}"


class Load:
    """A number of clients in the background, and one that uses lanes."""

    def __init__(
        self, server: RunningServer, clients: int = 8, sizes: tuple[int, ...] = SIZES,
        models: tuple[tuple[str, int, bool], ...] = ALONE,
    ) -> None:  # fmt: skip
        self.verdict = Verdict()
        self._stop = threading.Event()
        self._clients: list[threading.Thread] = [
            Client(server, number, self._stop, self.verdict, sizes, models)
            for number in range(clients)
        ]
        self._clients.append(LaneClient(server, clients, self._stop, self.verdict, sizes, models))

    def __enter__(self) -> Verdict:
        for client in self._clients:
            client.start()
        return self.verdict

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for client in self._clients:
            client.join(60)
