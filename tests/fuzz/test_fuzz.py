"""Short form of `make fuzz`: the corpus, and some mutations of each input."""

import random
import tracemalloc
from pathlib import Path

import pytest

from tests.fuzz import __main__ as campaign
from tests.fuzz.targets import TARGETS, inputs, mutated

MUTATIONS = 150
MOST_BYTES = 64 << 20  # limit for an input of a few KB


@pytest.mark.parametrize("name", TARGETS)
def test_inputs_end_as_documented(name: str) -> None:
    known, rng = inputs(name), random.Random(name)
    tracemalloc.start()
    try:
        for data in known:
            TARGETS[name](data)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < MOST_BYTES
    for _ in range(MUTATIONS):
        data = mutated(rng, rng.choice(known), rng.choice(known))
        try:
            TARGETS[name](data)
        except Exception as ex:
            ex.add_note(f"input: {data!r}")
            raise


def test_a_merge_that_fails_leaves_the_corpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "corpus" / "lane" / "cov-1"
    kept.parent.mkdir(parents=True)
    kept.touch()
    monkeypatch.setattr(campaign, "CORPUS", tmp_path / "corpus")
    for status in (0, 1):
        monkeypatch.setattr(campaign, "engine", lambda *_, status=status, **__: (status, "no"))
        with pytest.raises(RuntimeError, match="merged nothing of lane"):
            campaign.keep("lane", tmp_path / "state")
    assert kept.exists()


def test_what_a_turn_begins_with_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = "#30\tINITED cov: 7\nstat::number_of_executed_units: 100\n"
    monkeypatch.setattr(campaign, "engine", lambda *_, **__: (0, told))
    assert campaign.turn("lane", tmp_path, 100, 1)["new"] == 70
    monkeypatch.setattr(campaign, "engine", lambda *_, **__: (1, "#3\tREDUCE cov: 7\n"))
    assert campaign.turn("lane", tmp_path, 100, 1)["new"] == 0
    assert campaign.progress(tmp_path)["inputs"] == 70
