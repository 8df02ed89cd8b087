"""Command ``shmserve index FOLDER``: writes the index of a model repository for a web server."""

import argparse
import hashlib
import os
from pathlib import Path

import msgspec

from shmserve.errors import ConfigError
from shmserve.repository.remote_index import INDEX, VERSION, IndexFile, RemoteIndex
from shmserve.repository.text_files import IGNORED

_CHUNK = 1 << 20


def main(arguments: argparse.Namespace) -> int:
    """Write `index.json` into the folder atomically, and print a summary. Raise ConfigError if a
    file cannot be read or written."""
    root = Path(arguments.folder)
    try:
        models = {
            folder.name: _files(folder)
            for folder in sorted(root.iterdir())
            if folder.is_dir() and not folder.name.startswith(".") and folder.name not in IGNORED
        }
        data = msgspec.json.format(msgspec.json.encode(RemoteIndex(VERSION, models)))
        new = root / f".{INDEX}.new"
        new.write_bytes(data + b"\n")
        new.replace(root / INDEX)
    except OSError as ex:
        raise ConfigError(f"{ex.filename}: {ex.strerror}") from None
    print(f"{root / INDEX}: {len(models)} models, {sum(map(len, models.values()))} files")
    return 0


def _files(model: Path) -> dict[str, IndexFile]:
    files = {}
    for folder, subfolders, names in os.walk(model):
        subfolders[:] = sorted(s for s in subfolders if s not in IGNORED)
        path = Path(folder)
        for name in subfolders:
            if (path / name).is_symlink():
                raise ConfigError(
                    f"{path / name}: a link to a folder; put the folder there instead"
                )
        for name in sorted(names):
            files[str((path / name).relative_to(model))] = _described(path / name)
        if not names and not subfolders and path != model:
            files[f"{path.relative_to(model)}/"] = IndexFile(0, "")
    return files


def _described(path: Path) -> IndexFile:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return IndexFile(size, digest.hexdigest())
