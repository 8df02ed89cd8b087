"""The command line, without a server."""

import sys

import msgspec
import pytest

from shmserve import cli
from shmserve.cli import check, serve, show
from shmserve.config import Settings
from shmserve.errors import Unavailable
from shmserve.tensor.spec import ModelSpec


class Folder(msgspec.Struct):
    specs: tuple[ModelSpec, ...]
    failures: dict[str, str] = {}

    def instances(self):
        return []


class Scan(msgspec.Struct):
    models: dict[str, Folder]
    failures: dict[str, str] = {}


@pytest.fixture
def settings(tmp_path):
    return Settings(model_repository=(str(tmp_path),), run_dir=str(tmp_path / "run"))


def test_check_tells_one_line_each_and_fails_on_a_problem(settings, capsys):
    good = Scan({"m": Folder((ModelSpec("m", "1", "", "python", 0, (), ()),))})
    assert check.check(settings, lambda paths: good) == 0
    assert "ok    model m version 1: python, 0 instances" in capsys.readouterr().out
    assert check.check(settings, lambda paths: Scan({}, {"bad": "line 3"})) == 1
    assert "FAIL  model bad: line 3" in capsys.readouterr().out


def test_check_fails_without_a_repository(tmp_path, capsys):
    settings = Settings(model_repository=(str(tmp_path / "none"),))
    assert check.check(settings, lambda paths: Scan({})) == 1
    assert "is not a directory" in capsys.readouterr().out


def test_a_bad_setting_is_told_and_fails(monkeypatch, capsys):
    monkeypatch.setenv("SHMSERVE_NONSENSE", "1")
    assert cli.main(["check"]) == 1
    assert capsys.readouterr().err == (
        "shmserve: unknown setting SHMSERVE_NONSENSE in the environment\n"
    )


def test_show_without_a_server_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SHMSERVE_RUN_DIR", str(tmp_path))
    assert cli.main(["show", "models"]) == 1
    assert capsys.readouterr().err == "shmserve: no server answers in the run directory\n"
    with pytest.raises(Unavailable):
        show.ask(str(tmp_path), "models")


def test_serve_becomes_gunicorn_with_our_configuration():
    words = serve.command(["--reload"])
    assert words[:4] == [sys.executable, "-m", "gunicorn", "-c"]
    assert words[4].endswith("gunicorn.conf.py")
    assert words[5:] == ["--reload", "shmserve.app"]


def test_tables_are_aligned_numbers_to_the_right():
    rows = [{"role": "http", "pid": 5}, {"role": "executor", "pid": 12345, "reason": "a\nb"}]
    assert show.table(rows).splitlines() == [
        "role        pid  reason",
        "http          5",
        "executor  12345  a b",
    ]
