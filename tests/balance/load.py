"""Clients of HAProxy that loop and record the result of every request."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from threading import Thread

import grpc
import numpy as np

from tests.balance.hosts import BACKENDS, Balancer, begun
from tests.grpc_client import Client, request
from tests.servers import UnixConnection

Told = tuple[str, str, str]  # for `Outcome`: the result, the host, the reason

PER_CALL = "gRPC per call"  # calls that their clients' libraries may send again
_GIVE_UP_S = 30.0  # a request without an answer by then is lost
_PAD = 40_000  # elements of a large request: more than HAProxy keeps for a retry
_CLEAR = (502, 503, 504)
_CLEAR_CODES = ("UNAVAILABLE", "ABORTED", "RESOURCE_EXHAUSTED", "CANCELLED", "INTERNAL")


@dataclass(frozen=True)
class Outcome:
    """One request. `told`: ``answered``, the status of a clear error, or the problem; `why`: the
    error's text."""

    number: int
    door: str
    sent_at: float
    ended_at: float
    told: str
    host: str = ""
    why: str = ""

    @property
    def took_s(self) -> float:
        return self.ended_at - self.sent_at

    @property
    def answered(self) -> bool:
        return self.told == "answered"

    @property
    def lost(self) -> bool:
        return self.told.startswith("lost")


@dataclass
class Tally:
    """Results of the requests of some time.

    `again`: requests that HAProxy sent to another host. `not_begun`: clear errors of requests that
    no model has seen. `untrue`: requests answered with 503, which promises that no model has seen
    the request, although a model has. `gap_s`: the longest time without any answer.
    """

    sent: int = 0
    answered: int = 0
    again: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    not_begun: int = 0
    untrue: list[int] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    hosts: Counter[str] = field(default_factory=Counter)
    twice: list[str] = field(default_factory=list)
    gap_s: float = 0.0
    slowest_s: float = 0.0
    slowest_error_s: float = 0.0

    def line(self) -> str:
        errors = ", ".join(f"{count} x {told}" for told, count in sorted(self.errors.items()))
        by_host = " ".join(f"{host}={count}" for host, count in sorted(self.hosts.items()))
        return (
            f"sent {self.sent}, answered {self.answered} ({by_host}), sent again {self.again}, "
            f"errors {self.errors.total()} ({errors or 'none'}; {self.not_begun} not begun), "
            f"lost {len(self.lost)}, run twice {len(self.twice)}, longest gap {self.gap_s:.2f} s, "
            f"longest answer {self.slowest_s:.2f} s, longest error {self.slowest_error_s:.2f} s"
        )


class Load:
    """Clients over HTTP, of small and of large requests, and over gRPC."""

    def __init__(self, balancer: Balancer, folder: str, small: int, large: int, rpc: int) -> None:
        self._balancer = balancer
        self._folder = folder
        self._stop = threading.Event()
        self._numbers = itertools.count(1)
        self._outcomes: list[Outcome] = []
        self._lock = threading.Lock()
        self._threads = [
            *self._clients(small, self._over_http, 1, self._stop),
            *self._clients(large, self._over_http, _PAD, self._stop),
            *self._clients(rpc, self._over_grpc, "gRPC", balancer.grpc, self._stop),
            *self._clients(rpc, self._over_grpc, PER_CALL, balancer.grpc_per_call, self._stop),
        ]

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *_: object) -> None:
        self._end(self._threads, self._stop)

    @contextlib.contextmanager
    def more(self, small: int) -> Iterator[None]:
        """So many more clients, of small requests over HTTP."""
        stop = threading.Event()
        threads = self._clients(small, self._over_http, 1, stop)
        try:
            yield
        finally:
            self._end(threads, stop)

    def _clients(self, count: int, work: Callable[..., None], *arguments: object) -> list[Thread]:
        made = [Thread(target=work, args=arguments, daemon=True) for _ in range(count)]
        for thread in made:
            thread.start()
        return made

    def _end(self, threads: list[Thread], stop: threading.Event) -> None:
        stop.set()
        for thread in threads:
            thread.join(_GIVE_UP_S + 5)
        assert not any(thread.is_alive() for thread in threads), "clients do not end"

    def redispatched(self) -> int:
        """Return how many requests HAProxy has sent to another host so far."""
        table = self._balancer.table()
        return sum(int(table[backend, "BACKEND"]["wredis"]) for backend in BACKENDS)

    def outcomes(self, begun_at: float, ended_at: float) -> list[Outcome]:
        """Return the outcomes of requests that ended within this time."""
        with self._lock:
            return [o for o in self._outcomes if begun_at <= o.ended_at < ended_at]

    def tally(self, begun_at: float, ended_at: float, again: int) -> Tally:
        """Return the tally of requests that ended within this time."""
        outcomes = self.outcomes(begun_at, ended_at)
        ran = Counter(number for number, _ in begun(self._folder))
        made = Tally(len(outcomes), again=again)
        ends = [begun_at]
        for outcome in outcomes:
            if outcome.answered:
                made.answered += 1
                made.hosts[outcome.host] += 1
                ends.append(outcome.ended_at)
                made.slowest_s = max(made.slowest_s, outcome.took_s)
            elif outcome.lost:
                seen = "begun" if ran[outcome.number] else "not begun"
                made.lost.append(f"{outcome.door} {outcome.number}, {seen}: {outcome.told}")
            else:
                made.slowest_error_s = max(made.slowest_error_s, outcome.took_s)
                made.errors[f"{outcome.door} {outcome.told}"] += 1
                made.reasons[outcome.why] += 1
                made.not_begun += not ran[outcome.number]
                if outcome.told == "503" and ran[outcome.number]:
                    made.untrue.append(outcome.number)
        made.twice = [f"{o.door} {o.number}" for o in outcomes if ran[o.number] > 1]
        made.gap_s = max((b - a for a, b in itertools.pairwise([*sorted(ends), ended_at])))
        return made

    # ------------------------------------------------------------- clients

    def _loop(self, door: str, send: Callable[[int], Told], stop: threading.Event) -> None:
        while not stop.is_set():
            number, sent_at = next(self._numbers), time.monotonic()
            try:
                told = send(number)
            except Exception as ex:  # for any error: the request has no clear end
                told = (f"lost: {ex!r}", "", "")
            outcome = Outcome(number, door, sent_at, time.monotonic(), *told)
            with self._lock:
                self._outcomes.append(outcome)
            if not outcome.answered:
                time.sleep(0.02)

    def _over_http(self, elements: int, stop: threading.Event) -> None:
        connection = UnixConnection(self._balancer.http, _GIVE_UP_S)

        def send(number: int) -> Told:
            data = [number, *[0] * (elements - 1)]
            shape = {"name": "ID", "shape": [elements], "datatype": "INT64", "data": data}
            body = json.dumps({"inputs": [shape]})
            try:
                connection.request("POST", "/v2/models/work/infer", body)
                answer = connection.getresponse()
                document = answer.read()
            except (OSError, http.client.HTTPException):
                connection.close()
                raise
            if answer.status != 200:
                return _clear(str(answer.status), map(str, _CLEAR), document.decode())
            outputs = {o["name"]: o["data"] for o in json.loads(document)["outputs"]}
            return _answered(number, outputs["ID"][0], outputs["HOST"][0])

        with contextlib.closing(connection):
            self._loop("HTTP" if elements == 1 else "HTTP large", send, stop)

    def _over_grpc(self, door: str, path: str, stop: threading.Event) -> None:
        with Client(f"unix:{path}") as client:

            def send(number: int) -> Told:
                array = np.array([number], np.int64)
                message = request(array, "work", name="ID", datatype="INT64")
                try:
                    answer = client.call("ModelInfer", message, timeout=_GIVE_UP_S)
                except grpc.RpcError as ex:
                    return _clear(ex.code().name, _CLEAR_CODES, ex.details())
                names = [output.name for output in answer.outputs]
                raw = dict(zip(names, answer.raw_output_contents, strict=True))
                back = int(np.frombuffer(raw["ID"], np.int64)[0])
                return _answered(number, back, raw["HOST"][4:].decode())

            self._loop(door, send, stop)


def _clear(told: str, clear: Iterable[str], why: str) -> Told:
    text = re.sub(r"<[^>]*>|[0-9]+", "…", " ".join(why.split()))
    return (told if told in clear else f"lost: {told}"), "", text[:160]


def _answered(number: int, back: int, host: str) -> Told:
    return ("answered" if back == number else f"lost: the answer to {back}"), host, ""
