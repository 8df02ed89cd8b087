"""Every mistake of the catalogue still applies to the code, and a test has caught it.

`make cuda-mistakes` makes the mistakes.
"""

from pathlib import Path

from tests import readme_table
from tests.cuda_mistakes.catalogue import MARK, MISTAKES, README

ROOT = Path(__file__).parents[2]


def test_each_can_be_made() -> None:
    """A mistake that no longer fits changed code would never be tried again."""
    texts = {mistake.file: (ROOT / mistake.file).read_text() for mistake in MISTAKES}
    assert [m.name for m in MISTAKES if texts[m.file].count(m.before) != 1] == []
    tests = {name for mistake in MISTAKES for name in mistake.tests}
    assert [name for name in tests if not (ROOT / f"tests/cuda/test_{name}.py").exists()] == []


def test_each_is_caught() -> None:
    rows = readme_table.rows(README, MARK)
    assert [name for name, *_ in rows] == [mistake.name for mistake in MISTAKES]
    assert [name for name, *_, fake, stand_in in rows if not fake and not stand_in] == []
    assert len(rows) >= 10
