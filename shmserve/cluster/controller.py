"""Control loop of a cluster: ask all nodes, decide, tell nodes and balancers.

The controller keeps no state that cannot be found out again: nodes report the models they hold.
The transport to the nodes is an argument (`Nodes`).
"""

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from shmserve.cluster.cluster_file import ClusterFile
from shmserve.cluster.haproxy_slots import NODES, Address, backend
from shmserve.cluster.haproxy_socket import Balancer
from shmserve.cluster.node_service import NodeReport, checked
from shmserve.cluster.policies.cluster_plan import UNKNOWN_WEIGHT, ClusterPlan, Decision
from shmserve.errors import Unavailable

_EMPTY = Decision({}, {}, {}, {})
_END_S = 20.0  # seconds for the current round to end

_log = logging.getLogger(__name__)


class Nodes(Protocol):
    """Nodes of the cluster, by name, and the transport to the nodes."""

    def update(
        self, orders: Mapping[str, frozenset[str]], timeout_s: float
    ) -> dict[str, NodeReport | None]:
        """Order the models that nodes should hold, and return the reports. A node without an order
        keeps its last one.

        Returns:
            Report of each node; None: the node has not answered. Nodes that have gone are absent.
        """

    def stop(self) -> None:
        """End all services after their requests. Raise Unavailable if some have not ended."""


@dataclass
class _Heard:
    report: NodeReport
    at: float


@dataclass(frozen=True)
class Status:
    """Overview for people: reports of all nodes, the last decision, problems of balancers."""

    nodes: dict[str, NodeReport] = field(default_factory=dict)
    decision: Decision = _EMPTY
    problems: tuple[str, ...] = ()


class Controller:
    """Thread that runs the control loop between `start` and `stop`."""

    def __init__(self, file: ClusterFile, nodes: Nodes) -> None:
        self._nodes = nodes
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._heard: dict[str, _Heard] = {}
        self._unread: dict[str, str] = {}  # by node: why its last report cannot be read
        self._decision = _EMPTY
        self._nothing = Decision({}, {name: {} for name in file.models}, {}, {})
        self._settings = file.settings
        self._plan = ClusterPlan(file.rules(), file.settings.drain_s)
        self._balancers = [Balancer(address) for address in file.settings.haproxy_sockets]
        self._begun = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)

    def start(self) -> None:
        for balancer in self._balancers:
            balancer.start()
        self._thread.start()

    def stop(self) -> None:
        """Route no more requests to any node, then end the services. Raise Unavailable if the last
        round or some services have not ended; call again."""
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
            problems = [f"node {name[:12]}: {reason}" for name, reason in self._unread.items()]
            problems += (what for each in self._balancers for what in each.problems)
            return Status(nodes, self._decision, tuple(problems))

    def _run(self) -> None:
        while not self._end.is_set():
            begun = time.monotonic()
            try:
                self.tick()
            # keep looping: the next round may succeed, and no other thread runs rounds
            except Exception:
                _log.exception("a round of the controller failed")
            self._end.wait(max(0.0, begun + self._settings.interval_s - time.monotonic()))

    def tick(self) -> None:
        """Run a round: exchange orders and reports, decide, tell the balancers."""
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
        before, self._unread = self._unread, {}
        for name, report in reports.items():
            try:
                if report is not None:
                    self._heard[name] = _Heard(checked(report), now)
            except Unavailable as ex:  # of this node, which counts as silent
                self._unread[name] = ex.message
                if before.get(name) != ex.message:
                    _log.warning("node %s: %s", name[:12], ex.message)
        lost_nodes = [
            name
            for name, heard in self._heard.items()
            if name not in reports or now - heard.at > self._settings.node_timeout_s
        ]
        for name in lost_nodes:
            _log.warning("node %s is gone", name[:12])
            del self._heard[name]

    def _beginning(self, now: float, reports: Mapping[str, NodeReport | None]) -> bool:
        """Return True while nodes have yet to report for the first time. A decision without these
        reports would move models that are already in place."""
        early = not self._decision.orders and now - self._begun < self._settings.node_timeout_s
        return early and (not reports or None in reports.values())

    def _backends(self, decision: Decision) -> dict[str, dict[Address, int]]:
        """Return the weights of addresses, by backend."""
        up = {name: heard.report for name, heard in self._heard.items() if heard.report.http}
        # a few nodes suffice for requests that name no model
        front_nodes = sorted(up)[: self._settings.haproxy_slots]
        routes = {**decision.routes, NODES: dict.fromkeys(front_nodes, UNKNOWN_WEIGHT)}
        weights_by_backend: dict[str, dict[Address, int]] = {}
        for model, weights in routes.items():
            for door in ("http", "grpc"):
                addresses = weights_by_backend.setdefault(backend(door, model), {})
                for node, weight in weights.items():
                    report = up.get(node)
                    address = getattr(report, door) if report is not None else None
                    if address is not None:
                        addresses[address] = weight
        return weights_by_backend

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
