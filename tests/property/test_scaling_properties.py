"""Replicas and weights: sufficient, within bounds, and without oscillation."""

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from shmserve.cluster.policies.cluster_plan import MOST, weights
from shmserve.cluster.policies.replica_scaling import ReplicaScaler, ScalingRule

RULE = ScalingRule(least=1, most=20, queue_s=0.05, up_s=3, down_s=30)


def seen(demand: float, replicas: int) -> tuple[float, float]:
    """Return the queueing time in seconds and the busy executors, at most one per replica."""
    return queue_s(demand, replicas), min(demand, replicas)


def queue_s(demand: float, replicas: int) -> float:
    """Return the queueing time in s of 10 ms requests, for `replicas` executors under a load of
    `demand` executors."""
    use = demand / replicas
    return 5.0 if use >= 0.99 else 0.01 * use / (1 - use)


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 30), st.integers(0, 30)), max_size=300))
def test_it_stays_within_its_bounds(seen):
    scaler = ReplicaScaler(RULE)
    before = scaler.wanted
    for now, (wait_s, demand, ready) in enumerate(seen):
        wanted = scaler.observe(float(now), ready, wait_s, demand)
        assert RULE.least <= wanted <= RULE.most
        assert wanted >= before - max(1, before // 10)
        assert wanted <= max(before + 1, before * 2)
        before = wanted


@given(st.floats(0, 15))
def test_it_comes_to_rest_under_a_steady_load(demand):
    scaler = ReplicaScaler(RULE)
    history = [
        scaler.observe(float(now), scaler.wanted, *seen(demand, scaler.wanted))
        for now in range(3000)
    ]
    last = history[-1000:]
    assert len(set(last)) == 1, "no more changes"
    assert queue_s(demand, last[0]) <= RULE.queue_s
    ups_after_downs = sum(
        1 for a, b, c in zip(history, history[1:], history[2:], strict=False) if b < a and c > b
    )
    assert ups_after_downs == 0


@given(st.floats(0.1, 15), st.integers())
def test_noise_makes_it_go_up_and_down_once_at_most(demand, seed):
    dice = random.Random(seed)
    scaler = ReplicaScaler(RULE)
    history = []
    for now in range(2000):
        load = demand * dice.uniform(0.9, 1.1)
        history.append(scaler.observe(float(now), scaler.wanted, *seen(load, scaler.wanted)))
    changes = [b - a for a, b in itertools.pairwise(history) if a != b]
    turns = sum(1 for a, b in itertools.pairwise(changes) if a * b < 0)
    assert turns <= 2


def test_a_replica_goes_after_the_load_has():
    scaler = ReplicaScaler(RULE)
    for now in range(100):
        scaler.observe(float(now), scaler.wanted, *seen(6.0, scaler.wanted))
    high = scaler.wanted
    assert high >= 7
    for now in range(100, 1000):
        scaler.observe(float(now), scaler.wanted, *seen(1.0, scaler.wanted))
    assert 2 <= scaler.wanted < high


def test_none_is_added_before_the_last_ones_are_there():
    scaler = ReplicaScaler(RULE)
    wanted = [scaler.observe(float(now), 1, 9.0, 1.0) for now in range(60)]
    assert max(wanted) == 2


@given(
    st.dictionaries(st.sampled_from("abcdef"), st.none() | st.floats(0.01, 1e6)),
    st.dictionaries(st.sampled_from("abcdef"), st.integers(1, MOST)),
)
def test_weights_are_in_bounds_and_come_to_rest(speeds, before):
    first = weights(speeds, before)
    assert first.keys() == speeds.keys()
    assert all(1 <= weight <= MOST for weight in first.values())
    assert weights(speeds, first) == first


@given(st.lists(st.floats(1, 100), min_size=2, max_size=6))
def test_who_can_do_twice_as_much_gets_twice_as_much(speeds):
    named = {str(i): speed for i, speed in enumerate(speeds)}
    named["double"] = 2 * max(speeds)
    found = weights(named, {})
    assert found["double"] == MOST
    assert max(weight for name, weight in found.items() if name != "double") == MOST // 2


def test_small_differences_change_nothing():
    before = weights({"a": 100.0, "b": 50.0}, {})
    assert weights({"a": 100.0, "b": 55.0}, before) == before
    assert weights({"a": 100.0, "b": 90.0}, before) != before
    assert weights({"a": None, "b": None}, before) == before
