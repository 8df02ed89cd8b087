"""Where a request of a sequence goes."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from shmserve.core.scheduling.sequence_names import SequenceName
from shmserve.dispatch.pool.sequence_placement import BegunSequences, home_of, where_to_begin
from shmserve.protocol.control.data_messages import Execute
from shmserve.shm.status_page import digest
from tests.unit.rig import SPEC

OWNER = 7


class View:
    def __init__(self, free_slots: int, *sequences: int | str) -> None:
        self.free_slots = free_slots
        self._digests = {digest(SequenceName(OWNER, each)) for each in sequences}

    def has_sequence(self, number: int) -> bool:
        return number in self._digests


def order(id: int | str, *instances: tuple[str, int, View | None], owner: int = OWNER) -> list[str]:
    sequence = SequenceName(owner, id) if id else None
    views: Any = [
        (SimpleNamespace(instance=SimpleNamespace(name=name), load=load), view)
        for name, load, view in instances
    ]
    home = home_of(views, sequence)
    return (
        [home.instance.name]
        if home
        else [pool.instance.name for pool in where_to_begin(views, sequence)]
    )


def test_a_sequence_goes_where_it_lives_and_nowhere_else() -> None:
    them = (("a", 0, View(5, 2)), ("b", 9, View(0, 1, "2")), ("c", 0, None))
    assert order(1, *them) == ["b"]
    assert order("2", *them) == ["b"]
    assert order(2, *them) == ["a"]
    assert len(order(2, *them, owner=8)) == 3  # another owner's sequence lives nowhere


def test_one_that_lives_nowhere_goes_where_there_is_room() -> None:
    them = (("a", 0, View(0)), ("b", 3, View(1)), ("c", 0, None), ("d", 1, View(1)))
    assert order(1, *them)[:2] == ["d", "b"]
    assert order(0, *them)[0] == "d"  # no id at all: refused there


def test_those_that_begin_at_once_spread() -> None:
    them = [(name, 0, View(1)) for name in "abc"]
    first = Counter(order(number, *them)[0] for number in range(90))
    assert sorted(first) == ["a", "b", "c"]
    assert min(first.values()) > 15


def test_one_that_has_just_begun_is_known_before_its_executor_tells() -> None:
    begun, spec = BegunSequences(), SPEC
    pools: Any = [SimpleNamespace(instance=SimpleNamespace(process=name)) for name in "ab"]

    def told(sequence: int | str, *flags: str, owner: int = OWNER) -> Execute:
        parameters: dict[str, Any] = {f"sequence_{flag}": True for flag in flags}
        name = SequenceName(owner, sequence)
        return Execute(1, "", (), (), parameters, 0, 0, sequence=name)

    begun.sent(spec, told(1, "start"), pools[1])
    assert begun.home(spec, told(1), pools) is pools[1]
    assert begun.home(spec, told(1), pools[:1]) is None  # it is not there any more
    assert (
        begun.home(spec, told(1, "start"), pools) is None
    )  # it begins anew, wherever there is room
    assert begun.home(spec, told(2), pools) is None
    assert begun.home(spec, told(1, owner=8), pools) is None
    begun.sent(spec, told(1, "end"), pools[1])
    assert begun.home(spec, told(1), pools) is None
    for number in range(1, 10_001):
        begun.sent(spec, told(number, "start"), pools[0])
    assert len(begun._processes) < 5000
    assert begun.home(spec, told(9_999), pools) is pools[0]
    begun.sent(spec, told("x" * 100_000, "start"), pools[1])
    assert begun.home(spec, told("x" * 100_000), pools) is pools[1]
    assert all(isinstance(number, int) for _, _, number in begun._processes), "no client's text"
