"""Owners of sequences."""

from itertools import combinations

import pytest

from shmserve.core.caller import REMOTE_UID, UNKNOWN_CALLER, Caller, caller_number
from shmserve.core.scheduling.sequence_names import SequenceName, named_sequence, sequence_owner

CALLERS = [
    Caller(0, pid=1),
    Caller(1000),
    Caller(REMOTE_UID),
    Caller(REMOTE_UID, scopes=("use",), key="alice"),
    Caller(REMOTE_UID, scopes=("use",), key="bob"),
]


def test_owners_are_keys_then_users_then_all_remote_callers_together() -> None:
    assert all(
        sequence_owner(one, False) != sequence_owner(other, False)
        for one, other in combinations(CALLERS, 2)
    )
    assert sequence_owner(Caller(REMOTE_UID, socket=7), False) == UNKNOWN_CALLER
    assert sequence_owner(Caller(0, pid=2, started=3), False) == sequence_owner(CALLERS[0], False)
    of_alice = sequence_owner(CALLERS[3], False)
    assert sequence_owner(Caller(1000, scopes=("change",), key="alice"), False) == of_alice


def test_shared_sequences_are_everybodys() -> None:
    assert {sequence_owner(caller, True) for caller in CALLERS} == {UNKNOWN_CALLER}


@pytest.mark.parametrize(
    ("parameters", "named"),
    [({}, None), ({"sequence_id": 0}, None), ({"sequence_id": ""}, None)]
    + [({"sequence_id": id}, id) for id in (5, "5", -1)],
)
def test_0_and_nothing_name_no_sequence(
    parameters: dict[str, object], named: int | str | None
) -> None:
    owner = caller_number("user", "0")
    expected = None if named is None else SequenceName(owner, named)
    assert named_sequence(parameters, owner) == expected
