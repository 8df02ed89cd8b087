"""The loop of a cluster: look at all nodes, decide, tell nodes and balancers.

It keeps nothing that it could not find out again: what nodes hold, they say. What carries its words
to the nodes is an argument.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from shmserve.cluster.cluster_file import ClusterFile
from shmserve.cluster.haproxy_slots import NODES, Address, backend
from shmserve.cluster.haproxy_socket import ToldBalancer
from shmserve.cluster.node_service import NodeReport
from shmserve.cluster.policies.cluster_plan import ClusterPlan, Decision
from shmserve.cluster.policies.traffic_weights import UNKNOWN
from shmserve.errors import Unavailable

_EMPTY = Decision({}, {}, {}, {})
_END_S = 20.0  # for the round that is under way

_log = logging.getLogger(__name__)


class Nodes(Protocol):
    """The nodes there are, by name, and the way to them."""

    def update(
        self, orders: Mapping[str, frozenset[str]], timeout_s: float
    ) -> dict[str, NodeReport | None]:
        """Order what nodes should hold, those without orders nothing new; what they reported. None:
        a node that has not answered. Those that are not there any more are not in it."""

    def stop(self) -> None:
        """End all services, their requests first. Raises Unavailable: not all have ended."""


@dataclass
class _Heard:
    report: NodeReport
    at: float


@dataclass(frozen=True)
class Status:
    """For people: all nodes' reports, the last decision, what is wrong with balancers."""

    nodes: dict[str, NodeReport] = field(default_factory=dict)
    decision: Decision = _EMPTY
    problems: tuple[str, ...] = ()


class Controller:
    """Its owner calls `start` and `stop`."""

    def __init__(self, file: ClusterFile, nodes: Nodes) -> None:
        self._nodes = nodes
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._heard: dict[str, _Heard] = {}
        self._decision = _EMPTY
        self._nothing = Decision({}, {name: {} for name in file.models}, {}, {})
        self._settings = file.settings
        self._plan = ClusterPlan(file.rules(), file.settings.drain_s)
        self._balancers = [ToldBalancer(address) for address in file.settings.haproxy_sockets]
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)

    def start(self) -> None:
        for balancer in self._balancers:
            balancer.start()
        self._thread.start()

    def stop(self) -> None:
        """No more requests to any node, then the end of their services.

        Raises:
            Unavailable: the last round does not end, or not all services have; to be called again.
        """
        self._end.set()
        self._thread.join(_END_S)
        if self._thread.is_alive():
            raise Unavailable("the controller's last look at its nodes does not end")
        for balancer in self._balancers:
            balancer.tell({name: {} for name in self._backends(self._nothing)})
        for balancer in self._balancers:
            balancer.stop()
        time.sleep(self._settings.drain_s)
        self._nodes.stop()

    def status(self) -> Status:
        with self._lock:
            nodes = {name: heard.report for name, heard in self._heard.items()}
            problems = tuple(what for each in self._balancers for what in each.problems)
            return Status(nodes, self._decision, problems)

    def _run(self) -> None:
        while not self._end.is_set():
            begun = time.monotonic()
            try:
                self.tick()
            except Exception:  # the next look may fare better, and nobody else would look
                _log.exception("the cluster could not be looked after")
            self._end.wait(max(0.0, begun + self._settings.interval_s - time.monotonic()))

    def tick(self) -> None:
        """One round."""
        reports = self._nodes.update(self._decision.orders, self._settings.interval_s)
        now = time.monotonic()
        with self._lock:
            self._hear(now, reports)
            if self._beginning(now, reports):
                return
            looks = {name: heard.report.look for name, heard in self._heard.items()}
            before, self._decision = self._decision, self._plan.step(now, looks)
            self._log(before, self._decision)
            for balancer in self._balancers:
                balancer.tell(self._backends(self._decision))

    def _hear(self, now: float, reports: Mapping[str, NodeReport | None]) -> None:
        for name, report in reports.items():
            if report is not None:
                self._heard[name] = _Heard(report, now)
        gone = [
            name
            for name, heard in self._heard.items()
            if name not in reports or now - heard.at > self._settings.node_timeout_s
        ]
        for name in gone:
            _log.warning("node %s is gone", name[:12])
            del self._heard[name]

    def _beginning(self, now: float, reports: Mapping[str, NodeReport | None]) -> bool:
        """Whether nodes are still expected to say for the first time what they hold: who decided
        without them would move what is there."""
        early = not self._decision.orders and now - self._begun < self._settings.node_timeout_s
        return early and (not reports or None in reports.values())

    def _backends(self, decision: Decision) -> dict[str, dict[Address, int]]:
        """Weights of addresses, by backend."""
        up = {name: heard.report for name, heard in self._heard.items() if heard.report.http}
        some = sorted(up)[: self._settings.haproxy_slots]  # of all, who asks for no model needs few
        routes = {**decision.routes, NODES: dict.fromkeys(some, UNKNOWN)}
        found: dict[str, dict[Address, int]] = {}
        for model, weights in routes.items():
            for door in ("http", "grpc"):
                addresses = found.setdefault(backend(door, model), {})
                for node, weight in weights.items():
                    report = up.get(node)
                    address = getattr(report, door) if report is not None else None
                    if address is not None:
                        addresses[address] = weight
        return found

    @staticmethod
    def _log(before: Decision, after: Decision) -> None:
        for node, models in after.orders.items():
            had = before.orders.get(node, frozenset())
            for name in sorted(models - had):
                _log.info("node %s: load %s", node[:12], name)
            for name in sorted(had - models):
                _log.info("node %s: unload %s", node[:12], name)
        for name, lacking in after.missing.items():
            if before.missing.get(name) != lacking:
                _log.warning("no room for %d of %s's replicas", lacking, name)
