"""Prose of docstrings and comments: their first words, and their pronouns.

A pronoun makes a reader look for its noun. `CEILINGS` holds the density that each package has
reached: after a change that lowers a density, lower its ceiling.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PRONOUNS = re.compile(
    r"what|whatever|who|whoever|whom|whose|nobody|somebody|it|its|they|them|their"
    r"|one|ones|none|others|that|those|this|these|there"
)
OPENING = re.compile(
    r"(What|Who|Whoever|Whom|Those|It|They|Of|As `|The same|Whether|How|None|Nobody|One|All that)\b"
)
MOST_OPENINGS = 0.03
LONG_WORDS = 150  # below that, one sentence makes a file dense
MOST_OF_A_FILE = 75

# Pronouns in 1,000 words of docstrings and comments.
CEILINGS = {
    "shmserve/app": 71,
    "shmserve/cli": 28,
    "shmserve/client": 43,
    "shmserve/cluster": 39,
    "shmserve/coordinator": 37,
    "shmserve/core": 43,
    "shmserve/cuda": 36,
    "shmserve/dispatch": 32,
    "shmserve/executor": 43,
    "shmserve/exporter": 34,
    "shmserve/fetcher": 36,
    "shmserve/frontends": 40,
    "shmserve/grps": 43,
    "shmserve/observe": 47,
    "shmserve/protocol": 36,
    "shmserve/repository": 42,
    "shmserve/settings": 44,
    "shmserve/shm": 49,
    "shmserve/supervisor": 54,
    "shmserve/tensor": 39,
    "shmserve/testing": 46,
    "shmserve/transport": 49,
    "bench": 52,
    "tests": 46,
}


def docstrings(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
        if isinstance(node, documented) and (text := ast.get_docstring(node)):
            yield text


def comments(path: Path) -> Iterator[str]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@cache
def words(path: Path) -> list[str]:
    text = " ".join([*docstrings(path), *comments(path)])
    return re.findall(r"[A-Za-z']+", text.lower())


def density(found: list[str]) -> float:
    return 1000 * sum(bool(PRONOUNS.fullmatch(word)) for word in found) / max(1, len(found))


def sources(package: str) -> list[Path]:
    found = (ROOT / package).rglob("*.py")
    return [path for path in found if "_generated" not in path.parts]


def test_every_package_has_a_ceiling() -> None:
    folders = [path for path in (ROOT / "shmserve").iterdir() if (path / "__init__.py").exists()]
    packages = {f"shmserve/{path.name}" for path in folders if path.name != "_generated"}
    assert packages | {"tests", "bench"} == CEILINGS.keys()


@pytest.mark.parametrize("package", CEILINGS)
def test_a_package_has_no_more_pronouns_than_before(package: str) -> None:
    found = [word for path in sources(package) for word in words(path)]
    assert density(found) <= CEILINGS[package]


def test_no_long_file_is_dense() -> None:
    dense = {}
    for path in [*sources("shmserve"), *sources("bench")]:
        found = words(path)
        if len(found) >= LONG_WORDS and density(found) > MOST_OF_A_FILE:
            dense[str(path.relative_to(ROOT))] = round(density(found))
    assert dense == {}


def test_docstrings_open_with_a_noun_or_a_verb() -> None:
    paths = [*sources("shmserve"), *sources("bench")]
    texts = [text for path in paths for text in docstrings(path)]
    openings = [text.partition("\n")[0] for text in texts if OPENING.match(text)]
    assert len(openings) <= MOST_OPENINGS * len(texts), openings
