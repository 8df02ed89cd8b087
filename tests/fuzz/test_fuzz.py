"""The short form of `make fuzz`: what is in the corpus, and some mutations of it."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from tests.fuzz.targets import TARGETS, inputs, mutated

MUTATIONS = 150
MOST_BYTES = 64 << 20  # that an input of a few KB may cost


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
