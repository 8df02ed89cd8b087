"""The file of keys while a server runs: changed, broken, gone, made by the command."""

import errno
import logging
import os
from pathlib import Path

import pytest

from shmserve.cli.serving import key as command
from shmserve.config import Settings
from shmserve.core.keys import entry_text
from shmserve.errors import ConfigError
from shmserve.transport.trust import key_file
from shmserve.transport.trust.key_file import KeyFile


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "keys.toml"
    path.write_text(entry_text("old", "first", ("use",), None))
    return path


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(key_file.time, "monotonic", lambda: now[0])  # type: ignore[attr-defined]
    return now


def rewrite(path: Path, text: str) -> None:
    """Write a text of the same size, with another time: clocks of file systems have ticks."""
    before = path.stat().st_ctime_ns
    while path.stat().st_ctime_ns == before:
        path.write_text(text)


def name_of(keys: KeyFile, presented: str) -> str | None:
    key = keys.holder(presented)
    return key.name if key is not None else None


def test_a_change_is_seen_a_second_later(path: Path, clock: list[float]) -> None:
    keys = KeyFile(Settings(keys_file=str(path)))
    assert name_of(keys, "first") == "old"
    info = path.stat()
    rewrite(path, entry_text("new", "other", ("use",), None))
    os.utime(path, ns=(info.st_atime_ns, info.st_mtime_ns))  # of the same size and time
    assert name_of(keys, "first") == "old", "it is not looked at for each request"
    clock[0] += 1
    assert name_of(keys, "first") is None
    assert name_of(keys, "other") == "new"


@pytest.mark.parametrize("broken", ["", "[old]\nsha256 = 1", None])
def test_a_broken_file_keeps_the_keys(path: Path, clock: list[float], caplog, broken) -> None:
    keys = KeyFile(Settings(keys_file=str(path)))
    if broken is None:
        path.unlink()
    else:
        path.write_text(broken)
        path.chmod(0o606 if not broken else 0o600)  # anybody's: it could be anybody's keys
    for _ in range(3):
        clock[0] += 1
        assert name_of(keys, "first") == "old"
    errors = [r for r in caplog.records if r.levelno == logging.ERROR]
    assert len(errors) == 1, "once for each change"
    assert "the old keys stay valid: 1" in errors[0].getMessage()
    path.unlink(missing_ok=True)
    path.write_text(entry_text("new", "other", ("use",), None))
    clock[0] += 1
    assert name_of(keys, "other") == "new"


def test_a_reading_that_fails_is_tried_again(path: Path, clock: list[float], monkeypatch) -> None:
    keys = KeyFile(Settings(keys_file=str(path)))
    rewrite(path, entry_text("new", "other", ("use",), None))

    def full(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", full)
        clock[0] += 1
        assert name_of(keys, "first") == "old"
    clock[0] += 1
    assert name_of(keys, "first") is None, "it was withdrawn"
    assert name_of(keys, "other") == "new"


def test_what_keeps_a_server_from_starting(tmp_path) -> None:
    path = tmp_path / "none"
    for settings, told in (
        (Settings(keys_file=str(path)), f"^keys_file: {path} cannot be read \\(No such file"),
        (Settings(keys_required_from="anyone"), "there are no keys without keys_file"),
    ):
        with pytest.raises(ConfigError, match=told):
            key_file.read(settings)
    path.write_text("[a\n")
    with pytest.raises(ConfigError, match=rf"^keys_file: {path}: not TOML: .* \(at line 1, column"):
        key_file.read(Settings(keys_file=str(path)))


def test_the_command_makes_keys(tmp_path, capsys) -> None:
    path = tmp_path / "made.toml"
    settings = Settings(keys_file=str(path))
    command.new(settings, None, "ci", ["use", "send-models"], 1)
    command.new(settings, str(path), "ops", ["change"], None)
    first, second = capsys.readouterr().out.split()
    keys = KeyFile(settings)
    assert len(first) >= 43
    assert [name_of(keys, key) for key in (first, second, first[:-1])] == ["ci", "ops", None]
    assert first not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    before = path.read_bytes()
    for name, scopes, days, told in (
        ("ci", ["use"], None, "has a key 'ci' already"),
        ("a b", ["use"], None, "is no name"),
        ("c", ["root"], None, "no scope 'root'"),
        ("c", ["use"], 0, "--days"),
    ):
        with pytest.raises(ConfigError, match=told):
            command.new(settings, None, name, scopes, days)
    assert path.read_bytes() == before
    with pytest.raises(ConfigError, match="--file"):
        command.new(Settings(), None, "c", ["use"], None)
