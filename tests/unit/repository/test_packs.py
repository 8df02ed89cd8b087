"""Packs: archives of environments, unpacked once and removed after use."""

import fcntl
import io
import os
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmserve.errors import ConfigError
from shmserve.repository import packs

MIB = 1 << 20


def archive(path: Path, *members: tarfile.TarInfo) -> str:
    with tarfile.open(path, "w:gz") as file:
        for member in members:
            file.addfile(member, io.BytesIO(bytes(member.size)))
    return str(path)


def member(
    name: str, kind: bytes = tarfile.REGTYPE, link: str = "", size: int = 0, mtime: int = 0
) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.mtime = mtime
    info.type, info.linkname, info.size, info.mode = kind, link, size, 0o755
    return info


def acquired(pack: str, root: Path, most: int = MIB, seconds: float = 60.0) -> tuple[str, int]:
    return packs.acquire(pack, str(root), most, time.monotonic() + seconds)


def test_a_pack_is_unpacked_once_and_goes_with_its_last_user(tmp_path: Path) -> None:
    root = tmp_path / "environments"
    pack = archive(tmp_path / "a.tar.gz", member("bin", tarfile.DIRTYPE), member("bin/python"))
    folder, first = acquired(pack, root)
    assert os.access(f"{folder}/bin/python", os.X_OK)
    Path(folder, "mark").touch()
    again, second = acquired(pack, root)
    assert (again, os.path.exists(f"{again}/mark")) == (folder, True)
    os.close(first)
    packs.sweep(str(root))
    assert os.path.exists(folder)
    os.close(second)
    packs.sweep(str(root))
    assert os.listdir(root) == []


def test_what_an_interrupted_process_has_left_is_not_used(tmp_path: Path) -> None:
    root = tmp_path / "environments"
    pack = archive(tmp_path / "a.tar.gz", member("whole"))
    folder, lock = acquired(pack, root)
    os.ftruncate(lock, 0)  # as if it had been killed before the end
    os.close(lock)
    Path(folder, "half").touch()
    folder, lock = acquired(pack, root)
    os.close(lock)
    assert os.listdir(folder) == ["whole"]


def test_a_folder_that_cannot_be_removed_is_tried_again(tmp_path: Path, monkeypatch: Any) -> None:
    root = tmp_path / "environments"
    folder, lock = acquired(archive(tmp_path / "a.tar.gz", member("x")), root)
    os.close(lock)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.rmtree", lambda *_, **__: None)
        packs.sweep(str(root))
    assert os.path.exists(folder)
    packs.sweep(str(root))
    assert os.listdir(root) == []


def test_a_changed_pack_is_another_pack(tmp_path: Path) -> None:
    root = tmp_path / "environments"
    first = acquired(archive(tmp_path / "a.tar.gz", member("old")), root)
    second = acquired(archive(tmp_path / "a.tar.gz", member("new"), member("newer")), root)
    assert os.listdir(first[0]) == ["old"]
    assert sorted(os.listdir(second[0])) == ["new", "newer"]
    os.close(first[1])
    os.close(second[1])


def test_another_process_that_unpacks_is_not_waited_for_without_end(tmp_path: Path) -> None:
    root = tmp_path / "environments"
    pack = archive(tmp_path / "a.tar.gz", member("x"))
    folder, lock = acquired(pack, root)
    os.close(lock)
    with packs._lock(f"{folder}.lock", fcntl.LOCK_EX) as fd:
        assert fd >= 0
        with pytest.raises(ConfigError, match="has not unpacked the pack in time"):
            acquired(pack, root, seconds=0.0)


def text_file(path: Path) -> str:
    path.write_text("no archive")
    return str(path)


def fifo(path: Path) -> str:
    os.mkfifo(path)
    return str(path)


HOSTILE: dict[str, Callable[[Path], str]] = {
    "harmful member": lambda path: archive(path, member("../out")),
    "harmful member.*link": lambda path: archive(path, member("a", tarfile.SYMTYPE, "/etc")),
    "harmful member.*outside": lambda path: archive(
        path, member("a", tarfile.SYMTYPE, ".."), member("a/out")
    ),
    "harmful member.*special": lambda path: archive(path, member("a", tarfile.FIFOTYPE)),
    "special": lambda path: archive(path, member("a", tarfile.CHRTYPE)),
    "not an archive": text_file,
    "more than 1048576 bytes": lambda path: archive(path, member("a", size=2 * MIB)),
    "is no file": lambda path: str(path.parent),
    "the pack is no file": fifo,
    "not an archive.*'missing' not found": lambda path: archive(
        path, member("a", tarfile.LNKTYPE, "missing")
    ),
    "more than 200 folders": lambda path: archive(
        path, member("a/" * 800 + "b"), member("a/" * 1600 + "b"), member("../out")
    ),
    "not an archive.*timestamp": lambda path: archive(path, member("a", mtime=1 << 70)),
}


@pytest.mark.parametrize("text", HOSTILE)
def test_archives_that_are_refused_leave_nothing(tmp_path: Path, text: str) -> None:
    root = tmp_path / "environments"
    with pytest.raises(ConfigError, match=text):
        acquired(HOSTILE[text](tmp_path / "a.tar.gz"), root)
    assert not (tmp_path / "out").exists()
    packs.sweep(str(root))
    assert os.listdir(root) == []


@pytest.mark.parametrize(
    ("script", "seconds", "fault"),
    [
        (b"echo broken >&2\nexit 1\n", 60.0, "conda-unpack failed: broken"),
        (b"printf '\\377' >&2\nexit 1\n", 60.0, "conda-unpack failed: "),
        (b"exec sleep 600\n", 2.0, "conda-unpack takes longer than load_timeout_s"),
    ],
)
def test_a_failing_conda_unpack_fails_the_load(
    tmp_path: Path, script: bytes, seconds: float, fault: str
) -> None:
    script = b"#!/bin/sh\n" + script
    python, unpack = member("bin/python", size=len(script)), member("bin/conda-unpack")
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as file:
        file.addfile(python, io.BytesIO(script))
        file.addfile(unpack)
    with pytest.raises(ConfigError, match=f"the pack's {fault}"):
        acquired(str(tmp_path / "a.tar.gz"), tmp_path / "environments", seconds=seconds)
