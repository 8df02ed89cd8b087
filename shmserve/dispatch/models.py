"""Loading and unloading models: from a frontend to the coordinator and back.

What a request brings along (a configuration, files) does not fit a message: it is written to
a folder of the run directory that only this user can look into. The folder is the
coordinator's from the moment it is asked; until then it is removed here.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import shutil
from collections.abc import Mapping

from shmserve import config
from shmserve.config import Settings
from shmserve.errors import (
    Code,
    DeadlineExceeded,
    Internal,
    InvalidArgument,
    Unavailable,
    from_code,
)
from shmserve.protocol.control.model_messages import LoadModel, ModelAnswer, UnloadModel
from shmserve.repository import names
from shmserve.transport import rundir
from shmserve.transport.link import Link
from shmserve.transport.questions import Make, close_all

log = logging.getLogger(__name__)

_BEYOND_S = 10.0  # after `load_timeout_s`, for the coordinator to say what became of it


class ModelDesk:
    """The coordinator's desk for models, as a frontend sees it."""

    def __init__(self, link: Link, process: str, settings: Settings) -> None:
        self._link = link
        self._process = process
        self._settings = settings
        self._run_dir = config.run_dir(settings)
        self._count = itertools.count(1)

    def folders(self) -> list[str]:
        """Names of the models in the repository, loaded or not."""
        return names(self._settings.model_repository)

    def load(self, name: str, model_config: str | None, files: Mapping[str, bytes]) -> None:
        """Load a model and wait until it serves; with files it is made of nothing else.

        Args:
            name: a valid model name.
            model_config: a configuration as JSON in place of the model's own.
            files: relative path -> content; the paths have been checked.

        Raises:
            ShmserveError: it could not be loaded; the text is for the client.
        """
        overrides = ""
        if model_config is not None:
            overrides = f"{self._process}-{next(self._count)}"
            try:
                self._write(overrides, name, model_config, files)
            except BaseException:
                shutil.rmtree(rundir.overrides(self._run_dir, overrides), ignore_errors=True)
                raise
        self._ask(lambda ticket, _: LoadModel(ticket, name, overrides))

    def unload(self, name: str) -> None:
        """Serve a model no more; unknown ones are no error."""
        self._ask(lambda ticket, _: UnloadModel(ticket, name))

    def _ask(self, make: Make) -> None:
        try:
            answer, fds = self._link.ask(make, self._settings.load_timeout_s + _BEYOND_S)
        except Unavailable:
            raise DeadlineExceeded("the request has not been done in time; it goes on") from None
        close_all(fds)
        if not isinstance(answer, ModelAnswer):
            raise Unavailable("the coordinator gave no answer about a model")
        if answer.error_code:
            raise from_code(Code(answer.error_code), answer.error)

    def _write(
        self, overrides: str, name: str, model_config: str, files: Mapping[str, bytes]
    ) -> None:
        folder = rundir.overrides(self._run_dir, overrides)
        try:
            _make(rundir.overrides(self._run_dir), "")
            os.mkdir(folder, 0o700)
            _write(os.path.join(folder, rundir.OVERRIDE_CONFIG), model_config.encode())
            for path, content in files.items():
                target = os.path.join(folder, name, path)
                _make(folder, os.path.dirname(os.path.join(name, path)))
                _write(target, content)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            raise InvalidArgument("two files of the request have paths that contradict") from None
        except OSError as ex:
            log.error("overrides cannot be written model=%s error=%s", name, ex.strerror)
            raise Internal("the files of the request cannot be stored") from None


def _make(folder: str, inside: str) -> None:
    """Make a folder and those inside it, for this user only whatever the umask."""
    for part in ["", *filter(None, inside.split("/"))]:
        folder = os.path.join(folder, part)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)


def _write(path: str, content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)
