"""The list of what went wrong: bounded, and the same thing is one entry."""

from __future__ import annotations

from shmserve.core.stats.incidents import LIMIT, Trouble, Troubles


def test_the_same_thing_soon_again_is_counted_and_comes_last() -> None:
    troubles = Troubles()
    troubles.add(0.0, "a/1", "broke")
    troubles.add(1.0, "b/1", "broke")
    troubles.add(50.0, "a/1", "broke", 3)
    assert troubles.list() == (
        Trouble(1.0, 1.0, "b/1", "broke", 1),
        Trouble(0.0, 50.0, "a/1", "broke", 4),
    )


def test_after_a_while_it_is_another() -> None:
    troubles = Troubles()
    troubles.add(0.0, "a/1", "broke")
    troubles.add(61.0, "a/1", "broke")
    assert len(troubles.list()) == 2


def test_only_the_latest_are_kept_and_texts_are_cut() -> None:
    troubles = Troubles()
    for number in range(LIMIT + 10):
        troubles.add(float(number), f"m{number}", "x" * 1000)
    kept = troubles.list()
    assert len(kept) == LIMIT
    assert kept[-1].what == f"m{LIMIT + 9}"
    assert {len(entry.text) for entry in kept} == {300}
