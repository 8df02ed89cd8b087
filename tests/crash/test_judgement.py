"""Judgement of answers by the crash campaigns, tested without a service."""

import itertools
import math
import random
import threading
from typing import Any, cast

import pytest
from msgspec.structs import replace

from bench import long
from tests.crash import load
from tests.crash.chaos import at_random
from tests.crash.load import LoadClient, Verdict, Work
from tests.crash.region_load import RegionClient
from tests.crash.soak import Sample, grown
from tests.running_server import RunningServer


def work() -> Work:
    server = cast(RunningServer, None)
    return Work(server, threading.Event(), Verdict(), (4,), load.ALONE)


class Failing(LoadClient):
    def send(self, count: int) -> tuple[str, bool]:
        raise KeyError("OUT")


class Unknown(RegionClient):
    """Client whose regions the service never knows."""

    def _ask(self, model: str, array: Any) -> tuple[int, Any]:
        if self.registered_at is None:
            self.registered_at, self.unknown = 1.0, 0
        return 400, {"error": "Unable to find shared memory region: 'a'"}


def asked(client: Unknown, times: int) -> list[str]:
    client.size = 16
    with client._memory() as client.source:
        return [client.send(count)[0] for count in range(times)]


def test_a_client_that_fails_is_wrong() -> None:
    client = Failing(work(), 1)
    client.run()
    assert client.verdict.wrong == ["Failing ended: KeyError('OUT')"]


def test_what_is_lost_is_clean_with_its_executor_only() -> None:
    client = Failing(work(), 1)
    client.lost("502", "the executor of model 'm' died while it had the request")
    assert (client.verdict.wrong, len(client.verdict.refused)) == ([], 1)
    client.lost("502", "steps before it have run")
    assert client.verdict.wrong == ["502 and no executor died: steps before it have run"]


def test_clients_that_do_not_end_are_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hanging(LoadClient):
        def loop(self) -> None:
            held.wait(20)

    held = threading.Event()
    monkeypatch.setattr(load, "_END_S", 0.05)
    loaded = load.Load(cast(RunningServer, None), clients=0, more=(Hanging,))
    loaded._clients = [one for one in loaded._clients if isinstance(one, Hanging)]
    with loaded as verdict:
        pass
    held.set()
    assert verdict.wrong == ["Hanging 1 does not end"]


def test_a_region_is_unknown_once_unless_something_disturbs() -> None:
    client = Unknown(work(), 1)
    assert asked(client, 3) == ["region unknown", "wrong", "region unknown"]
    client.verdict.disturbed_until = math.inf
    assert asked(client, 3) == ["region unknown"] * 3


def test_no_disturbance_is_within_itself() -> None:
    pairs = itertools.islice(at_random(random.Random(1), ["a", "b"]), 200)
    assert all(outer != inner for outer, inner, _ in pairs)


def test_replaced_processes_and_missing_samples_are_problems() -> None:
    row = Sample(0.0, "grpc", 1, "7", 0, 1.0, 1.0, 1.0, 5, 2)
    rows = [replace(row, second=float(second)) for second in range(9)]
    assert grown(rows) == []
    assert grown([*rows[:-1], replace(rows[-1], pids="8")]) == ["grpc: process 7 has ended"]
    late = [*(replace(one, role="http") for one in rows[:-1]), rows[-1]]
    assert grown(late) == ["grpc: no samples of the second quarter"]


def test_a_long_run_whose_process_was_replaced_has_failed() -> None:
    first = (0, {"grpc 0": (7, 5, 1.0)})
    assert long.ended(first, first) == []
    assert long.ended(first, (0, {"grpc 0": (8, 5, 1.0)})) == ["grpc 0: it has ended"]
