"""Repositories that are one model's folder or Python file: `NAME=PATH` in `model_repository`.

Such models are laid out in the run directory in a repository's form, for all readers of
repositories. The master lays the models out; the coordinator keeps copies of text files up to date.
"""

import logging
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
from shmserve.log_fields import log_fields

_log = logging.getLogger(__name__)
_logged: set[str] = set()  # files that could not be copied

_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_TEXTS = (".pbtxt", ".txt")  # configuration and labels
_MOST = 16 << 20
_FILE, _CONFIG = "model.py", "config.pbtxt"


def lay_out(settings: Settings) -> None:
    """Make the folder that `model_places.repository_paths` names for `NAME=PATH` entries.

    A folder without version folders becomes version 1 of its model: a link leads to the folder,
    and its text files are copied. A Python file becomes the model.py of version 1: links lead to
    the file.

    Raise ConfigError if a path is no readable folder or Python file, or two entries have the same
    name.
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
            reason = f"'{path}' is not a readable folder or Python file ({ex.strerror})"
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
    if model_places.is_one_file(path):
        if os.path.exists(os.path.join(os.path.dirname(path), _CONFIG)):
            advice = f"make a folder with {_FILE} and {_CONFIG}, and serve that"
            _log.warning("%s beside %s is not read: %s", _CONFIG, os.path.basename(path), advice)
        os.makedirs(os.path.join(place, "1"), 0o700)
        for link in (model_places.SOURCE, os.path.join("1", _FILE)):
            os.symlink(path, os.path.join(place, link))
        return
    if _has_versions(path):
        os.symlink(path, place)
        return
    os.mkdir(place, 0o700)
    os.symlink(path, os.path.join(place, "1"))
    for problem in _copy_texts(path, place):
        raise problem


def _has_versions(path: str) -> bool:
    with os.scandir(path) as listing:
        return any(_VERSION.fullmatch(entry.name) and entry.is_dir() for entry in listing)


def refresh(run_dir: str) -> None:
    """Bring laid-out models up to date: copy changed text files again, and lay out anew a model
    that has got, or has lost, its version folders."""
    root = model_places.single_dir_in(run_dir)
    for name in os.listdir(root) if os.path.isdir(root) else ():
        place = os.path.join(root, name)
        with suppress(OSError):  # a folder that cannot be read now keeps its layout and copies
            linked = os.path.islink(place)
            path = os.readlink(place if linked else os.path.join(place, "1"))
            if _has_versions(path) != linked:
                _link_anew(path, place, run_dir)
            elif not linked:
                _log_once(_copy_texts(path, place))


def _link_anew(path: str, place: str, run_dir: str) -> None:
    with TemporaryDirectory(prefix="single-", dir=run_dir) as folder:
        fresh = os.path.join(folder, "fresh")
        _link(path, fresh)
        os.rename(place, os.path.join(folder, "old"))
        os.rename(fresh, place)


def _log_once(problems: list[OSError]) -> None:
    for ex in problems:
        if ex.filename not in _logged:
            _logged.add(ex.filename)
            fields = log_fields(file=str(ex.filename), reason=ex.strerror or "")
            _log.warning("a model's text file cannot be copied, the old copy stays", extra=fields)


def _copy_texts(source: str, place: str) -> list[OSError]:
    """Make the text files in `place` equal to those in `source`, with their times: by its files'
    times a changed model is known. Return why some cannot be copied."""
    found, copies = _texts(source), _texts(place)
    problems = []
    for name in copies.keys() - found.keys():
        os.unlink(os.path.join(place, name))
    for name, (size, time_ns) in found.items():
        if copies.get(name) != (size, time_ns):
            try:
                copy = shutil.copyfile(os.path.join(source, name), os.path.join(place, name))
                os.utime(copy, ns=(time_ns, time_ns))
            except OSError as ex:
                problems.append(ex)
    return problems


def _texts(folder: str) -> dict[str, tuple[int, int]]:
    """Return size and time of each text file in a folder."""
    with os.scandir(folder) as listing:
        files = [e for e in listing if e.name.endswith(_TEXTS) and e.is_file()]
    infos = {entry.name: entry.stat() for entry in files}
    return {n: (i.st_size, i.st_mtime_ns) for n, i in infos.items() if i.st_size <= _MOST}
