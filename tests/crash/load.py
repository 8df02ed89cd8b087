"""Clients that loop and classify every answer: right, a clean 503, lost with the executor, or a
closed connection."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import struct
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import grpc
import numpy as np

import shmserve.client
from tests import grpc_client
from tests.running_server import RunningServer, binary_request

SIZES = (10, 1000, 300_000)  # numbers of floats; the last size needs a separate segment
# Models, the number that each adds, and whether an input is a row of a batch.
ALONE = (("echo", 0, False), ("pair", 1, False))
WITH_BATCHES = (*ALONE, ("gathered", 1, True))
DOORS = ("right", "over lane", "over grpc", "over regions")  # counters of right answers
_TIMEOUT_S = 30
_END_S = 60.0  # for all clients to end
_LOST = "died while it had the request"  # text that every 502 must contain
_REFUSED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED)


@dataclass
class Verdict:
    """Answers that the clients got; `wrong` must stay empty.

    `disturbed_until`: monotonic time of the last disturbance. State of processes from before may
    be lost.
    """

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    closed: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # s between two right answers of a client
    disturbed_until: float = 0.0

    def silent(self, doors: tuple[str, ...] = DOORS) -> list[str]:
        """Return a complaint for each protocol without a right answer."""
        return [f"no answer was {door}" for door in doors if not self.counts[door]]

    def add(self, other: Verdict) -> None:
        self.counts += other.counts
        self.wrong += other.wrong
        self.refused += other.refused
        self.closed += other.closed
        self.gaps += other.gaps


@dataclass(frozen=True)
class Work:
    """Data that all clients of a load share."""

    server: RunningServer
    stop: threading.Event
    verdict: Verdict
    sizes: tuple[int, ...]
    models: tuple[tuple[str, int, bool], ...]


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


class LoadClient(threading.Thread):
    """Client that sends numbered tensors and checks the answers."""

    def __init__(self, work: Work, number: int) -> None:
        super().__init__(daemon=True)
        self.work = work
        self.server = work.server
        self.number = number
        self.verdict = work.verdict

    def run(self) -> None:
        try:
            self.loop()
        except Exception as ex:  # else a dead client would go unnoticed
            self.wrong(f"{type(self).__name__} ended: {ex!r}")

    def loop(self) -> None:
        last = time.monotonic()
        with contextlib.closing(self):
            for count in itertools.count(1):
                if self.work.stop.is_set():
                    return
                kind, right = self.send(count)
                self.verdict.counts[kind] += 1
                if right:
                    now = time.monotonic()
                    self.verdict.gaps.append(now - last)
                    last = now
                else:
                    time.sleep(0.005)

    def send(self, count: int) -> tuple[str, bool]:
        """Send one request; return the counter of the answer, and whether the answer was right."""
        raise NotImplementedError

    def close(self) -> None: ...

    def next(self, count: int) -> tuple[str, np.ndarray, np.ndarray]:
        """Return a model, an input, and the expected output."""
        models, sizes = self.work.models, self.work.sizes
        model, plus, is_row = models[count % len(models)]
        size = sizes[count // len(models) % len(sizes)]
        shape = (1, size) if is_row else (size,)
        array = np.full(shape, self.number * 100_000 + count % 9973, np.float32)
        return model, array, array + plus

    def judge(self, kind: str, got: bytes, wanted: np.ndarray) -> tuple[str, bool]:
        if got == wanted.tobytes():
            return kind, True
        first = struct.unpack("<f", got[:4])[0] if len(got) >= 4 else None
        return self.wrong(f"{kind}: foreign content: wanted {wanted.flat[0]}, got {first}")

    def wrong(self, what: str) -> tuple[str, bool]:
        self.verdict.wrong.append(what)
        return "wrong", False

    def refused(self, kind: str, reason: str) -> tuple[str, bool]:
        if not reason:
            return self.wrong(f"{kind} without a reason")
        self.verdict.refused.append(reason)
        return kind, False

    def lost(self, kind: str, reason: str) -> tuple[str, bool]:
        """Count a request lost with a killed executor as refused.

        A load without kills must check that no such answer is among the refused.
        """
        if _LOST not in reason:
            return self.wrong(f"{kind} and no executor died: {reason}")
        return self.refused(kind, reason)

    def failed(self, door: str, status: int, reason: str) -> tuple[str, bool]:
        """Judge an answer without a result."""
        if status == 503:
            return self.refused(f"{door}503", reason)
        if status == 502:
            return self.lost(f"{door}502", reason)
        return self.wrong(f"{door}{status} {reason[:200]}")

    def closed(self, kind: str, error: object) -> tuple[str, bool]:
        self.verdict.closed.append(f"{kind}: {error!r}")
        return kind, False


class HttpClient(LoadClient):
    """Client with one connection, replaced when it closes."""

    connection: http.client.HTTPConnection | None = None

    def send(self, count: int) -> tuple[str, bool]:
        model, array, wanted = self.next(count)
        body, headers = binary_request(array)
        try:
            if self.connection is None:
                self.connection = http.client.HTTPConnection(
                    self.server.http_host, self.server.http_port, timeout=_TIMEOUT_S
                )
            self.connection.request("POST", f"/v2/models/{model}/infer", body, headers)
            answer = self.connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException) as ex:
            self.close()
            return self.closed("closed", ex)
        if answer.status != 200:
            return self.failed("", answer.status, repr(data[:200]))
        length = int(answer.headers["Inference-Header-Content-Length"])
        return self.judge("right", outputs_of(data, length)["OUT"], wanted)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
        self.connection = None


class LaneClient(LoadClient):
    """Client that uses lanes, and HTTP for models without lanes."""

    client: shmserve.client.Client | None = None
    lanes = True

    def send(self, count: int) -> tuple[str, bool]:
        model, array, wanted = self.next(count)
        try:
            if self.client is None:
                url = f"unix:{self.server.unix_path}"
                self.client = shmserve.client.connect(url, timeout=_TIMEOUT_S, lanes=self.lanes)
            result = self.client.infer(model, {"IN": array})
        except shmserve.client.InferenceError as ex:
            if ex.status == 0:
                return self.closed("lane 503", ex.message)
            return self.failed("lane ", ex.status, ex.message)
        return self.judge(f"over {result.transport}", result["OUT"].tobytes(), wanted)

    def close(self) -> None:
        if self.client is not None:
            self.client.close()


class GrpcClient(LoadClient):
    """Client with one gRPC channel."""

    client: grpc_client.Client | None = None

    def send(self, count: int) -> tuple[str, bool]:
        model, array, wanted = self.next(count)
        message = grpc_client.request(array, model, name="IN")
        if self.client is None:
            self.client = grpc_client.Client(self.server.grpc_address)
        try:
            answer = self.client.infer(message, timeout=_TIMEOUT_S)
        except grpc.RpcError as ex:
            if ex.code() in _REFUSED:
                return self.refused("grpc refused", ex.details())
            if ex.code() is grpc.StatusCode.ABORTED:
                return self.lost("grpc aborted", ex.details())
            return self.wrong(f"over gRPC: {ex.code()} {ex.details()}")
        names = [output.name for output in answer.outputs]
        return self.judge("over grpc", answer.raw_output_contents[names.index("OUT")], wanted)

    def close(self) -> None:
        if self.client is not None:
            self.client.close()


class Load:
    """Clients in the background: `clients` over HTTP, a lane client, and the types in `more`."""

    def __init__(
        self, server: RunningServer, clients: int = 8, sizes: tuple[int, ...] = SIZES,
        models: tuple[tuple[str, int, bool], ...] = ALONE, more: tuple[type[LoadClient], ...] = (),
    ) -> None:  # fmt: skip
        self.verdict = Verdict()
        self._stop = threading.Event()
        work = Work(server, self._stop, self.verdict, sizes, models)
        kinds: list[type[LoadClient]] = [*[HttpClient] * clients, LaneClient, *more]
        self._clients = [kind(work, number) for number, kind in enumerate(kinds)]

    def __enter__(self) -> Verdict:
        for client in self._clients:
            client.start()
        return self.verdict

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        give_up = time.monotonic() + _END_S
        for client in self._clients:
            client.join(max(0.0, give_up - time.monotonic()))
            if client.is_alive():
                client.wrong(f"{type(client).__name__} {client.number} does not end")
