"""Looks in, decisions out; and a small cluster simulated for some minutes."""

from dataclasses import replace

import pytest

from bench.scale.__main__ import figures
from bench.scale.simulation import Assumptions, Simulation
from shmserve.cluster.policies.cluster_plan import AGAIN_S, ClusterPlan, ModelRule
from shmserve.cluster.policies.measured_load import NodeLook, ReplicaCounts
from shmserve.cluster.policies.replica_scaling import ScalingRule

SHORT = Assumptions(
    hosts=16,
    models=4,
    seconds=300.0,
    use=0.3,
    run_s=0.2,
    ramp_s=60.0,
    model_memory=(1.0, 20.0),
    surge=(100.0, 150.0, 2.0),
    deaths=(200.0, 0.13),
)


def obeyed(looks: dict[str, NodeLook], plan: ClusterPlan, now: float) -> dict[str, NodeLook]:
    decision = plan.step(now, looks)
    return {
        node: replace(look, held=decision.orders[node], ready=decision.orders[node])
        for node, look in looks.items()
    }


def test_what_cannot_be_loaded_on_one_node_is_tried_on_another() -> None:
    plan = ClusterPlan({"m": ModelRule(10)})
    looks = {"a": NodeLook(10), "b": NodeLook(10)}
    orders = plan.step(0.0, looks).orders
    [first] = [node for node, models in orders.items() if models]
    other = "b" if first == "a" else "a"
    looks[first] = NodeLook(10, failed={"m": "no file"})
    for now in (1.0, AGAIN_S / 2):
        assert plan.step(now, looks).orders == {first: frozenset(), other: {"m"}}
    looks[other] = looks[first]
    plan.step(AGAIN_S / 2 + 1, looks)
    looks = {"a": NodeLook(10), "b": NodeLook(10)}
    assert any(plan.step(3 * AGAIN_S, looks).orders.values()), "not for ever"


def test_a_plan_that_begins_anew_leaves_models_where_they_are() -> None:
    rules = {name: ModelRule(10, ScalingRule(1, 3)) for name in ("one", "two")}
    both, one = frozenset({"one", "two"}), frozenset({"one"})
    looks = {"a": NodeLook(20, both, both), "b": NodeLook(20, one, one), "c": NodeLook(20)}
    decision = ClusterPlan(rules).step(0.0, looks)
    assert decision.orders == {"a": both, "b": one, "c": frozenset()}
    assert decision.replicas == {"one": 2, "two": 1}, "as many as there are"
    assert decision.routes == {"one": {"a": 128, "b": 128}, "two": {"a": 128}}


def test_a_model_that_is_not_wanted_any_more_gets_no_requests_and_goes() -> None:
    plan = ClusterPlan({"new": ModelRule(10)}, drain_s=2.0)
    looks = {"a": NodeLook(10, frozenset({"old"}), frozenset({"old"}))}
    seen = []
    for now in range(6):
        looks = obeyed(looks, plan, float(now))
        seen.append(set(looks["a"].held))
    assert seen[0] == {"old"}
    assert seen[-1] == {"new"}


def test_the_faster_node_gets_more() -> None:
    plan = ClusterPlan({"m": ModelRule(1, ScalingRule(2, 2))})
    held = frozenset({"m"})

    def looks(seconds: float) -> dict[str, NodeLook]:
        return {
            node: NodeLook(
                9, held, held, {}, {"m": ReplicaCounts(int(speed * seconds), 0.0, seconds)}
            )
            for node, speed in (("slow", 100), ("fast", 200))
        }

    for now in (1.0, 2.0, 3.0):
        routes = plan.step(now, looks(now)).routes
    assert routes["m"] == {"slow": 128, "fast": 256}


def test_a_model_whose_runs_are_longer_than_a_look_gets_replicas() -> None:
    plan = ClusterPlan({"m": ModelRule(1, ScalingRule(1, 2, queue_s=0.05, up_s=3.0))})
    held = frozenset({"m"})

    def looks(now: int, ends: int) -> dict[str, NodeLook]:
        done = min(now, ends) // 5  # one run of 5 s after the other, looked at each second
        counts = {"m": ReplicaCounts(done, waited_s=done * 9.0, busy_s=done * 5.0)}
        return {"a": NodeLook(1, held, held, counts=counts), "b": NodeLook(1)}

    wanted = [plan.step(float(now), looks(now, ends=99)).replicas["m"] for now in range(20)]
    assert wanted[0] == 1
    assert wanted[-1] == 2
    idle = ClusterPlan({"m": ModelRule(1, ScalingRule(1, 2, queue_s=0.05, up_s=15.0))})
    for now in range(60):  # the only request there is says nothing for longer than two runs
        assert idle.step(float(now), looks(now, ends=5)).replicas["m"] == 1


@pytest.fixture(scope="module")
def simulated():
    simulation = Simulation(SHORT)
    simulation.run()
    return simulation


def test_in_a_simulated_cluster_every_model_is_served_within_the_memory(simulated) -> None:
    found = figures(simulated.series, SHORT)
    assert found["over_memory"] == 0
    assert found["flaps"] == 0
    assert found["unserved_models_at_the_end"] == 0
    assert found["answered"] > 1000
    assert found["sent"] - found["answered"] < found["sent"] / 10
    assert found["wait_s"]["before the surge"]["p50"] < SHORT.queue_s


def test_the_same_seed_gives_the_same_figures(simulated: Simulation) -> None:
    again = figures(Simulation(SHORT).run(), SHORT)
    first = figures(simulated.series, SHORT)
    assert again.pop("decision_ms")
    assert first.pop("decision_ms")
    assert again == first
