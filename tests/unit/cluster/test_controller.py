"""The controller's rounds with obedient nodes, and the status shown to people."""

import math
import time
from collections.abc import Mapping
from typing import Any

import pytest

from shmserve.cli.serving import cluster as cluster_command
from shmserve.cluster.cluster_file import ClusterFile, ClusterSettings, ModelTable
from shmserve.cluster.controller import Controller, Status
from shmserve.cluster.haproxy_slots import Address
from shmserve.cluster.node_service import NodeReport
from shmserve.cluster.policies.measured_load import NodeLook, ReplicaCounts
from tests.running_server import wait_until

ROOM = 100


class ObedientNodes:
    """Nodes by name, and the models of each node; `silent` nodes do not answer."""

    def __init__(self, *names: str) -> None:
        self.held: dict[str, frozenset[str]] = dict.fromkeys(names, frozenset())
        self.orders: list[Mapping[str, frozenset[str]]] = []
        self.silent: set[str] = set()
        self.lies: dict[str, Any] = {}
        self.stopped = False

    def update(
        self, orders: Mapping[str, frozenset[str]], timeout_s: float
    ) -> dict[str, NodeReport | None]:
        self.orders.append(orders)
        self.held |= {name: models for name, models in orders.items() if name in self.held}
        return {
            name: None if name in self.silent else self._report(number, models)
            for number, (name, models) in enumerate(self.held.items())
        } | self.lies

    def _report(self, number: int, models: frozenset[str]) -> NodeReport:
        http, grpc = (Address("127.0.0.1", port + number, 8000) for port in (8000, 9000))
        return NodeReport(NodeLook(ROOM, models, models), http, grpc, pid=1, launches=1)

    def stop(self) -> None:
        self.stopped = True


def controller(nodes: ObedientNodes, **models: int) -> Controller:
    tables = {name: ModelTable(memory) for name, memory in models.items()}
    return Controller(ClusterFile(ClusterSettings(drain_s=0.01, interval_s=0.01), tables), nodes)


def test_models_are_ordered_and_move_when_their_node_goes() -> None:
    nodes = ObedientNodes("a", "b")
    made = controller(nodes, one=60, two=60)
    for _ in range(3):
        made.tick()
    assert sorted(map(sorted, nodes.held.values())) == [["one"], ["two"]]
    [survivor] = [name for name, models in nodes.held.items() if models == {"one"}]
    nodes.held = {survivor: nodes.held[survivor], "c": frozenset()}
    for _ in range(3):
        made.tick()
    assert nodes.held == {survivor: {"one"}, "c": {"two"}}
    assert made.status().nodes.keys() == {survivor, "c"}


def test_nobody_gets_orders_before_all_have_said_what_they_hold() -> None:
    nodes = ObedientNodes("a", "b")
    nodes.held["b"] = frozenset({"one"})
    nodes.silent.add("b")
    made = controller(nodes, one=10)
    made.tick()
    made.tick()
    assert nodes.orders[-1] == {}
    nodes.silent.clear()
    made.tick()
    made.tick()
    assert nodes.held == {"a": frozenset(), "b": {"one"}}


LIES = {
    "no report": "nonsense",
    "no look": NodeReport("look"),  # type: ignore[arg-type]
    "of another version": object.__new__(NodeReport),
    "no names": NodeReport(NodeLook(ROOM, frozenset({1}))),  # type: ignore[arg-type]
    "no number": NodeReport(NodeLook(ROOM, counts={"one": ReplicaCounts(1, math.nan)})),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_node_whose_report_cannot_be_read_costs_itself_alone(lie: str) -> None:
    nodes = ObedientNodes("a")
    nodes.lies["b"] = LIES[lie]
    made = controller(nodes, one=60)
    for _ in range(3):
        made.tick()
    assert nodes.held["a"] == {"one"}
    assert made.status().nodes.keys() == {"a"}
    [problem] = made.status().problems
    assert problem.startswith("node b: its report cannot be read: ")


def test_a_balancer_that_is_not_there_is_a_problem_and_nothing_else(tmp_path) -> None:
    nodes = ObedientNodes("a")
    settings = ClusterSettings(haproxy_sockets=(f"{tmp_path}/h.sock",), drain_s=0.01)
    made = Controller(ClusterFile(settings, {"one": ModelTable(10)}), nodes)
    made.start()
    wait_until(lambda: made.status().problems != (), "nobody is told")
    wait_until(lambda: nodes.held == {"a": {"one"}}, "it has no model")
    made.stop()
    [problem] = made.status().problems
    assert "h.sock: No such file" in problem


def test_who_asks_for_no_model_is_given_as_many_nodes_as_there_are_slots() -> None:
    nodes = ObedientNodes("a", "b", "c")
    settings = ClusterSettings(haproxy_slots=2)
    made = Controller(ClusterFile(settings, {"one": ModelTable(10)}), nodes)
    made.tick()
    assert len(made._backends(made.status().decision)["http_nodes"]) == 2


def test_it_runs_until_it_is_stopped() -> None:
    nodes = ObedientNodes("a")
    made = controller(nodes, one=10)
    made.start()
    made.stop()
    assert nodes.stopped


def test_other_models_take_the_place_of_those_before() -> None:
    nodes = ObedientNodes("a")
    made = controller(nodes, one=60)
    made.tick()
    made.tick()
    later = controller(nodes, two=60)
    for _ in range(6):
        later.tick()
        time.sleep(0.01)
    assert nodes.held == {"a": {"two"}}


def test_what_people_are_shown(capsys) -> None:
    nodes = ObedientNodes("a" * 56)
    made = controller(nodes, one=60, two=60)
    made.tick()
    made.tick()
    made.tick()
    status = made.status()
    cluster_command._print(status)
    printed = capsys.readouterr().out.splitlines()
    assert printed[1].split() == ["a" * 12, "127.0.0.1:8000", "0", "MiB", "one"]
    assert printed[-2].split() == ["one", "1", "1", "0"]
    assert printed[-1].split() == ["two", "1", "0", "1"]
    assert cluster_command.document(Status()) == {"nodes": [], "models": [], "problems": []}
