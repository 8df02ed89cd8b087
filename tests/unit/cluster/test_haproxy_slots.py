"""Slots of a balancer: assignment, and no repeated commands."""

import pytest

from shmserve.cluster.haproxy_slots import Address, ServerSlot, changes, slots
from shmserve.errors import Unavailable

STATE = """1
# be_id be_name srv_id srv_name srv_addr srv_op_state srv_admin_state srv_uweight srv_port
3 b 1 s1 10.0.0.1 2 0 128 8000
3 b 2 s2 127.0.0.1 0 5 1 1
3 b 3 s3 10.0.0.3 0 32 7 8000
3 b 4 s4 10.0.0.2 2 8 7 8000
"""
A, B, C, D, E = (Address(f"10.0.0.{i}", 8000, 8000) for i in range(1, 6))


def obeyed(found: list[ServerSlot], commands: list[str]) -> list[ServerSlot]:
    """Return the slots after the commands."""
    state = {f"{s.backend}/{s.server}": s for s in found}
    for command in commands:
        _, _, name, what, value, *more = command.split()
        slot = state[name]
        host, port, weight = slot.host, slot.port, slot.weight
        taken, drains = slot.taken, slot.drains
        match what:
            case "addr":
                host, port = value, int(more[1])
            case "weight":
                weight = int(value)
            case "state":
                taken, drains = value == "ready", value == "drain"
        state[name] = ServerSlot(slot.backend, slot.server, host, port, weight, taken, drains)
    return list(state.values())


def serving(found: list[ServerSlot]) -> dict[str, int]:
    return {slot.host: slot.weight for slot in found if slot.taken}


def test_the_list_of_servers_is_read() -> None:
    assert [slot.drains for slot in slots(STATE)] == [False, False, False, True]
    assert [slot.taken for slot in slots(STATE)] == [True, False, False, False]
    for wrong in ("", "2\n# a\n", "1\n# be_name\nx", "Unknown command"):
        with pytest.raises(Unavailable):
            slots(wrong)


@pytest.mark.parametrize(
    "wanted", [{}, {A: 1}, {A: 128, B: 3}, {B: 5, C: 6}, {A: 1, B: 2, C: 3}, {D: 256}]
)
def test_slots_become_what_is_wanted_and_then_nothing_more_is_said(wanted) -> None:
    commands, problems = changes(slots(STATE), {"b": wanted})
    after = obeyed(slots(STATE), commands)
    assert serving(after) == {address.host: weight for address, weight in wanted.items()}
    assert changes(after, {"b": wanted}) == ([], [])
    assert problems == []


def test_who_stays_keeps_its_slot() -> None:
    commands, _ = changes(slots(STATE), {"b": {A: 128, B: 3}})
    assert not [command for command in commands if "b/s1" in command]


def test_who_goes_drains_and_may_come_back() -> None:
    commands, _ = changes(slots(STATE), {"b": {}})
    assert commands == ["set server b/s1 state drain"]
    drained = obeyed(slots(STATE), commands)
    assert changes(drained, {"b": {}}) == ([], [])
    commands, _ = changes(drained, {"b": {A: 9}})
    assert {command.split()[2] for command in commands} == {"b/s1"}
    assert serving(obeyed(drained, commands)) == {"10.0.0.1": 9}


def test_more_than_there_are_slots_for_is_told() -> None:
    commands, problems = changes(slots(STATE), {"b": {A: 1, B: 1, C: 1, D: 1, E: 1}})
    assert len(serving(obeyed(slots(STATE), commands))) == 4
    assert problems == ["backend b: 1 slots are missing (haproxy_slots)"]


def test_other_backends_are_left_alone() -> None:
    assert changes(slots(STATE), {"other": {}}) == ([], [])
