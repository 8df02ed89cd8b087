"""Repositories that are one model's folder: `NAME=PATH` in `model_repository`.

Such models are laid out in the run directory in a repository's form, for all readers of
repositories.
"""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
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
    for entry in entries:
        text = entry.name.endswith(_TEXTS) and entry.is_file()
        if text and entry.stat().st_size <= _MOST:
            shutil.copyfile(entry.path, os.path.join(place, entry.name))
