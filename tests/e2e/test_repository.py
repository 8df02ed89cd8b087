"""A Triton repository runs on this server unchanged."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import triton_repository
from tests.servers import SMALL, Server, python

PROGRAM = Path(__file__).with_name("repository_program.py")
MODELS = ["batched", "completed", "bare", "colours", "dynamic", "words", "versions"]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return triton_repository.write(tmp_path_factory.mktemp("repository"))


@pytest.fixture
def triton_server(repository: Path) -> Iterator[Server]:
    with Server(repository, **SMALL) as server:
        yield server


def test_it_runs_unchanged(triton_server: Server, repository: Path) -> None:
    files = sorted(str(path) for path in repository.rglob("*"))
    printed = python(PROGRAM, triton_server.address())
    assert printed.split() == MODELS
    triton_server.stop()
    log = triton_server.log()
    assert "printed by batched" in log
    assert "executor batched/1/0 shmserve.model: finalized" in log
    hint = "configuration: optimization.input_pinned_memory: no effect (shared memory"
    assert log.count(hint) == 1
    assert sorted(str(path) for path in repository.rglob("*")) == files  # nothing was written


def test_check_tells_of_hints_without_effect(repository: Path) -> None:
    notes = [
        line
        for line in python(
            "-m",
            "shmserve",
            "check",
            environ={"PATH": "/usr/bin", "SHMSERVE_MODEL_REPOSITORY": str(repository)},
            cwd=Path(__file__).parents[2],
        ).splitlines()
        if line.startswith("note")
    ]
    assert [line.split()[2] for line in notes] == ["bare", "batched"], notes
    assert "max_batch_size is not set: a load chooses 4" in notes[0]
    assert "optimization.input_pinned_memory" in notes[1]
