"""Cluster drill: requests through HAProxy while nodes of a Ray cluster are killed and added.

    python -m tests.crash.cluster --seconds 600

Clients send to every model in turn. They retry requests that were refused (503, no connection) or
lost with their node (502, a connection that ends), because the balancer does not repeat requests
that may have run. Each request must get a right answer within `ANSWER_S`.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from tests import grpc_client
from tests.crash.cluster_rig import ClusterRig, kill, seconds_since
from tests.running_server import wait_until

ANSWER_S = 60.0
_AGAIN_S = 0.05
_REFUSED = (503,)
_BROKEN = (502, 504)


class ClusterLoad:
    """Clients that send numbered tensors to models in turn; a context manager."""

    def __init__(self, port: int, models: list[str], clients: int) -> None:
        self._port = port
        self._models = models
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.longest: float = 0.0  # longest time in s between two right answers of one client
        self._threads = [
            threading.Thread(target=self._run, args=(number,)) for number in range(clients)
        ]

    def __enter__(self) -> ClusterLoad:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * ANSWER_S)

    def _run(self, number: int) -> None:
        value, last = float(number * 1_000_000), time.monotonic()
        connection: http.client.HTTPConnection | None = None
        while not self._stop.is_set():
            value += 1
            model = self._models[int(value) % len(self._models)]
            connection = self._answered(connection, model, value)
            now = time.monotonic()
            with self._lock:
                self.longest, last = max(self.longest, now - last), now
        if connection is not None:
            connection.close()

    def _answered(
        self, connection: http.client.HTTPConnection | None, model: str, value: float
    ) -> http.client.HTTPConnection | None:
        """Send one request until an answer comes. Returns the connection for the next request."""
        tensor = {"name": "IN", "shape": [2], "datatype": "FP32", "data": [value, -value]}
        body = json.dumps({"inputs": [tensor]})
        deadline = time.monotonic() + ANSWER_S
        self._count("sent")
        for turn in range(100_000):
            try:
                if connection is None:
                    connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)
                connection.request("POST", f"/v2/models/{model}/infer", body)
                answer = connection.getresponse()
                status, text = answer.status, answer.read()
            except (OSError, http.client.HTTPException) as ex:
                if connection is not None:
                    connection.close()
                connection, status, text = None, 0, repr(ex).encode()
            if status == 200:
                self._judge(json.loads(text), value)
                self._count("answered after a retry" if turn else "answered at once")
                return connection
            what = "refused" if status in _REFUSED else f"broken off ({status or 'closed'})"
            self._count(what)
            if status not in (0, *_REFUSED, *_BROKEN) or time.monotonic() > deadline:
                self._count("lost")
                self._wrong(f"{model}: {status} {text[:200]!r}")
                return connection
            time.sleep(_AGAIN_S)
        return connection

    def _judge(self, document: Any, value: float) -> None:
        if document["outputs"][0]["data"] != [value + 1, -value + 1]:
            self._wrong(f"sent {value}, got {document}")

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _wrong(self, what: str) -> None:
        with self._lock:
            self.wrong = [*self.wrong, what][:20]


MODELS = {"one": (40, 1, 1), "two": (40, 1, 1), "both": (20, 2, 2)}
GROWS = {"grows": (10, 1, 2)}
ROOM = 120  # MiB; all models fit on one node
BOTH_NODES = {"one": 1, "two": 1, "both": 2, "grows": 1}


def drill(seconds: float, run_s: float = 0.002, clients: int = 4) -> dict[str, Any]:
    """Run the drill and return the figures: start one node, add a second, then kill and replace
    nodes."""
    report: dict[str, Any] = {"events": []}
    with ClusterRig({**MODELS, **GROWS}, ROOM, run_s) as rig:
        begun = time.monotonic()
        rig.add_node()
        rig.up()
        report["up_s"] = seconds_since(begun)
        wait_until(lambda: _routed(rig), "the balancer routes nothing")
        with ClusterLoad(rig.http_port, list(MODELS), clients) as load:
            report["second_node"] = _second_node(rig)
            report["over_grpc"] = _over_grpc(rig)
            report["scaled"] = _scale(rig)
            report["controller"] = _replace_controller(rig)
            if seconds:
                report["service"] = _restart_service(rig)
            end = time.monotonic() + seconds
            while True:
                report["events"].append(_kill_one(rig))
                if time.monotonic() > end:
                    break
                report["events"][-1]["whole_again_s"] = _replace(rig)
            time.sleep(1)
        report |= {
            "counts": dict(load.counts),
            "longest_gap_s": round(load.longest, 2),
            "wrong": load.wrong,
            "balancer": rig.balancer_counts(),
        }
        report["status"] = rig.command("status")
        services = {node: rig.service_pids(node) for node in rig.status().nodes}
        rig.kill_controller()  # a new controller may not have polled any node yet
        rig.status()
        report["down"] = rig.command("down").strip()
        report["left"] = [node for node in services if rig.service_pids(node)]
    return report


def _routed(rig: ClusterRig) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", rig.http_port, timeout=5)
    try:
        for name in MODELS:
            connection.request("GET", f"/v2/models/{name}/ready")
            answer = connection.getresponse()
            answer.read()
            if answer.status != 200:
                return False
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()
    return True


def _second_node(rig: ClusterRig) -> dict[str, float]:
    """Add a node; return the seconds until its service, its first model and its first answer.

    Time starts when Ray knows the empty node.
    """
    node = rig.add_node()
    begun = time.monotonic()
    times: dict[str, float] = {}

    def answered() -> bool:
        report = rig.status().nodes.get(node)
        if report is None or report.http is None:
            return False
        times.setdefault("service_up_s", seconds_since(begun))
        if report.look.ready:
            times.setdefault("first_model_s", seconds_since(begun))
        return rig.answered_by(report.http.port) > 0

    wait_until(answered, "the second node answers nothing")
    times["first_answer_s"] = seconds_since(begun)
    rig.wait_ready(BOTH_NODES)
    return times


def _over_grpc(rig: ClusterRig) -> dict[str, list[float]]:
    """Return the answer of each model over gRPC. Clients name the model for the balancer."""
    client = grpc_client.Client(f"127.0.0.1:{rig.grpc_port}")
    found = {}
    for name in MODELS:
        array = np.array([1.0, 2.0], np.float32)
        answer = _called(client, grpc_client.request(array, name, name="IN"), name)
        found[name] = np.frombuffer(answer.raw_output_contents[0], np.float32).tolist()
    client.channel.close()
    return found


def _called(client: grpc_client.Client, message: Any, model: str) -> Any:
    """Send a request and retry refusals, as the clients over HTTP do."""
    deadline = time.monotonic() + ANSWER_S
    while True:
        try:
            return client.call("ModelInfer", message, metadata=(("x-model", model),))
        except grpc.RpcError as ex:
            if ex.code() is not grpc.StatusCode.UNAVAILABLE or time.monotonic() > deadline:
                raise
            time.sleep(_AGAIN_S)


def _scale(rig: ClusterRig) -> dict[str, float]:
    """Send one model more load than one replica can serve, until two replicas run."""
    begun = time.monotonic()
    with ClusterLoad(rig.http_port, list(GROWS), 8) as load:
        rig.wait_ready({"grows": 2})
    return {"replicas": rig.ready()["grows"], "s": seconds_since(begun), **load.counts}


def _replace_controller(rig: ClusterRig) -> dict[str, Any]:
    """Kill the controller, then run `up` again. Neither new controller may move models."""
    before = {node: report.look.ready for node, report in rig.status().nodes.items()}
    begun = time.monotonic()
    rig.kill_controller()
    first = _first_orders(rig)
    seconds = seconds_since(begun)
    rig.up()
    second = _first_orders(rig)
    moved = {
        node: [sorted(ready), sorted(first.get(node, ())), sorted(second.get(node, ()))]
        for node, ready in before.items()
        if not ready <= first.get(node, frozenset()) & second.get(node, frozenset())
    }
    return {"s": seconds, "moved": moved}


def _first_orders(rig: ClusterRig) -> dict[str, frozenset[str]]:
    """Return the first orders of a new controller."""
    wait_until(lambda: bool(rig.status().decision.orders), "no controller decides")
    return rig.status().decision.orders


def _restart_service(rig: ClusterRig) -> dict[str, Any]:
    """Kill the service on a live node. The node must start the service again, with its models."""
    before = rig.status().nodes
    victim = sorted(before)[0]
    begun = time.monotonic()
    kill(rig.service_pids(victim))

    def back() -> bool:
        report = rig.status().nodes.get(victim)
        if report is None or report.launches == before[victim].launches:
            return False
        return bool(report.look.ready)

    wait_until(back, "the service does not come again")
    rig.wait_ready(BOTH_NODES)
    return {"killed_with": sorted(before[victim].look.ready), "s": seconds_since(begun)}


def _kill_one(rig: ClusterRig) -> dict[str, Any]:
    """Kill a node, and wait until the other has all models."""
    victim = random.choice(sorted(rig.status().nodes))
    held = sorted(rig.status().nodes[victim].look.ready)
    begun = time.monotonic()
    rig.kill_node(victim)
    wait_until(lambda: victim not in rig.status().nodes, "a dead node counts still")
    noticed_s = seconds_since(begun)
    rig.wait_ready(dict.fromkeys(BOTH_NODES, 1))
    return {"killed_with": held, "noticed_s": noticed_s, "all_served_again_s": seconds_since(begun)}


def _replace(rig: ClusterRig) -> float:
    """Return the seconds until a new node serves the models of the dead node."""
    begun = time.monotonic()
    rig.add_node()
    rig.wait_ready(BOTH_NODES)
    return seconds_since(begun)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--run-ms", type=float, default=2.0, help="how long the models run")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--output", type=Path, help="a file for the report, as JSON")
    arguments = parser.parse_args()
    report = drill(arguments.seconds, arguments.run_ms / 1000, arguments.clients)
    text = json.dumps(report, indent=1)
    if arguments.output:
        arguments.output.write_text(text)
    print(text)
    lost = report["counts"].get("lost", 0)
    return 1 if lost or report["wrong"] or report["left"] else 0


if __name__ == "__main__":
    sys.exit(main())
