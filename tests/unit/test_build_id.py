"""The identity of installed code."""

from importlib import metadata
from pathlib import Path

import pytest

from shmserve import build_id

RECORD = "shmserve/a.py,sha256=%s,1\nshmserve/__pycache__/a.pyc,,\n../bin/shmserve,sha256=%s,1\n"


class Installed:
    """Distribution with these hashes of a module and of a script. `at`: its folder."""

    def __init__(self, module: str, script: str, at: Path) -> None:
        self._record, self._at = RECORD % (module, script), at

    def read_text(self, name: str) -> str:
        assert name == "RECORD"
        return self._record

    def locate_file(self, path: str) -> Path:
        return self._at / path


def told(monkeypatch: pytest.MonkeyPatch, *installed: Installed) -> str:
    """Return the identity, where only the server is installed, or the client as well."""
    found = dict(zip(("shmserve", "shmserve-client"), installed, strict=False))

    def distribution(name: str) -> Installed:
        if name not in found:
            raise metadata.PackageNotFoundError
        return found[name]

    monkeypatch.setattr(metadata, "distribution", distribution)
    return build_id.build_id.__wrapped__()


def test_builds_differ_by_their_modules_only(monkeypatch) -> None:
    here = Path(build_id.__file__).parents[1]
    first = told(monkeypatch, Installed("1", "1", here), Installed("9", "1", here))
    assert len(first) == 12
    assert told(monkeypatch, Installed("1", "2", here), Installed("9", "2", here)) == first
    assert told(monkeypatch, Installed("2", "1", here), Installed("9", "1", here)) != first
    assert told(monkeypatch, Installed("1", "1", here), Installed("8", "1", here)) != first


def test_code_that_is_not_the_installed_has_no_build(monkeypatch, tmp_path) -> None:
    assert told(monkeypatch, Installed("1", "1", tmp_path)) == ""
    assert told(monkeypatch) == ""
