"""Wherever an operator's path leads: an error names the setting, and old values stay."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmserve import config
from shmserve.cli.serving import key as key_command
from shmserve.config import Settings
from shmserve.core.keys import entry_text
from shmserve.errors import ConfigError
from shmserve.transport.trust import file_changes, key_file, tls
from shmserve.transport.trust.key_file import KeyFile
from tests.tls_files import make_certificates


def large(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 30)


FILES: list[tuple[str, Callable[[Path], object]]] = [
    ("is not a regular file", os.mkfifo),
    ("is not a regular file", lambda path: path.symlink_to("/dev/zero")),
    ("is not a regular file", os.mkdir),
    ("has more than", large),
]
TOML = [
    *FILES,
    ("TOML", lambda path: path.write_bytes(b"a = " + b"9" * 5000)),
    ("TOML", lambda path: path.write_bytes(b"a = " + b"[" * 100_000)),
]


@pytest.fixture
def path(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(file_changes, "_LOOK_S", 0.0)
    return tmp_path / "given"


@pytest.mark.parametrize(("told", "make"), TOML)
def test_configurations(path: Path, told: str, make) -> None:
    make(path)
    with pytest.raises(ConfigError, match=told) as caught:
        config.load({"SHMSERVE_CONFIG": str(path)})
    assert caught.value.message.startswith(f"the file named by SHMSERVE_CONFIG, {path}, ")


@pytest.mark.parametrize(("told", "make"), TOML)
def test_keys(path: Path, told: str, make, caplog) -> None:
    path.write_text(entry_text("old", "first", ("use",), None))
    keys = KeyFile(Settings(keys_file=str(path)))
    path.unlink()
    make(path)
    for _ in range(2):
        assert keys.holder("first") is not None
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert line.startswith("keys_file: ")
    assert told in line
    with pytest.raises(ConfigError, match=r"^keys_file: "):
        key_file.read(Settings(keys_file=str(path)))
    with pytest.raises(ConfigError):
        key_command.new(Settings(), str(path), "new", ["use"], None)


@pytest.fixture(scope="module")
def pems(tmp_path_factory) -> Path:
    return make_certificates(tmp_path_factory.mktemp("tls"), "one")


def certificates(folder: Path, **paths: Path) -> tls.Certificates:
    given = {"cert": folder / "one.pem", "key": folder / "one.key", **paths}
    settings: dict[str, Any] = {f"grpc_tls_{name}": str(path) for name, path in given.items()}
    return tls.certificates(Settings(**settings), "grpc", "h2")


@pytest.mark.parametrize("which", ["cert", "key", "client_ca"])
@pytest.mark.parametrize(("told", "make"), FILES)
def test_certificates(pems: Path, path: Path, which: str, told: str, make, caplog) -> None:
    source = {"cert": "one.pem", "key": "one.key", "client_ca": "ca.pem"}[which]
    path.write_bytes((pems / source).read_bytes())
    made = certificates(pems, **{which: path})
    before = made.context()
    path.unlink()
    make(path)
    assert made.context() is made.context() is before
    (line,) = (record.getMessage() for record in caplog.records if record.levelname == "ERROR")
    assert f"grpc_tls_{which}: " in line
    assert told in line
    with pytest.raises(ConfigError, match=f"grpc_tls_{which}: "):
        certificates(pems, **{which: path})


def test_an_encrypted_key_asks_nobody(pems: Path, path: Path) -> None:
    words = ("ec", "-aes128", "-passout", "pass:word", "-in", pems / "one.key", "-out", path)
    subprocess.run(["openssl", *words], check=True, capture_output=True)
    with pytest.raises(ConfigError, match="not usable"):
        certificates(pems, key=path)
