"""Repositories that are one model's folder: `NAME=PATH` in `model_repository`.

Such models are laid out in the run directory in a repository's form, for all readers of
repositories. The master lays the models out; the coordinator keeps copies of text files up to date.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory

import msgspec

from shmserve import model_places
from shmserve.config import Settings
from shmserve.errors import ConfigError

_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_TEXTS = (".pbtxt", ".txt")  # configuration and labels
_MOST = 16 << 20


def lay_out(settings: Settings) -> None:
    """Make the folder that `model_places.repository_paths` names for `NAME=PATH` entries.

    A folder without version folders becomes version 1 of its model: a link leads to the folder,
    and its text files are copied.

    Raise ConfigError if a path is no readable folder, or two entries have the same name.
    """
    entries = [
        single for text in settings.model_repository if (single := model_places.single_of(text))
    ]
    root = model_places.single_dir(settings)
    shutil.rmtree(root, ignore_errors=True)
    for name, path in entries:
        place = os.path.join(root, name)
        if os.path.lexists(place):
            raise ConfigError(f"model_repository: '{name}=' is there twice")
        try:
            os.makedirs(root, 0o700, exist_ok=True)
            _link(os.path.abspath(path), place)
        except OSError as ex:
            reason = f"'{path}' is not a readable folder ({ex.strerror})"
            raise ConfigError(f"model_repository: {reason}") from None


@contextmanager
def laid_out_elsewhere(settings: Settings) -> Iterator[Settings]:
    """Yield settings with the models laid out in a temporary folder, not in a service's."""
    if not any(map(model_places.single_of, settings.model_repository)):
        yield settings
        return
    with TemporaryDirectory(prefix="shmserve-") as folder:
        apart = msgspec.structs.replace(settings, run_dir=folder)
        lay_out(apart)
        yield apart


def _link(path: str, place: str) -> None:
    with os.scandir(path) as listing:
        entries = list(listing)
    if any(_VERSION.fullmatch(entry.name) and entry.is_dir() for entry in entries):
        os.symlink(path, place)
        return
    os.mkdir(place, 0o700)
    os.symlink(path, os.path.join(place, "1"))
    _copy_texts(path, place)


def refresh(run_dir: str) -> None:
    """Copy text files of laid-out models without version folders again, if they have changed."""
    root = model_places.single_dir_in(run_dir)
    for name in os.listdir(root) if os.path.isdir(root) else ():
        place = os.path.join(root, name)
        with suppress(OSError):  # a folder that cannot be read now keeps its copies
            if not os.path.islink(place):
                _copy_texts(os.path.join(place, "1"), place)


def _copy_texts(source: str, place: str) -> None:
    """Make the text files in `place` equal to those in `source`, with their times: by its files'
    times a changed model is known."""
    found, copies = _texts(source), _texts(place)
    for name in copies.keys() - found.keys():
        os.unlink(os.path.join(place, name))
    for name, (size, time_ns) in found.items():
        if copies.get(name) != (size, time_ns):
            copy = shutil.copyfile(os.path.join(source, name), os.path.join(place, name))
            os.utime(copy, ns=(time_ns, time_ns))


def _texts(folder: str) -> dict[str, tuple[int, int]]:
    """Return size and time of each text file in a folder."""
    with os.scandir(folder) as listing:
        files = [e for e in listing if e.name.endswith(_TEXTS) and e.is_file()]
    infos = {entry.name: entry.stat() for entry in files}
    return {n: (i.st_size, i.st_mtime_ns) for n, i in infos.items() if i.st_size <= _MOST}
