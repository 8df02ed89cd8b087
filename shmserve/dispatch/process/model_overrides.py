"""Model overrides: stores the configuration and files of a load request.

Both may be too large for a message, so they are written to a folder of the run directory, readable
only by this user. The folder belongs to the coordinator once the coordinator was asked; before,
errors remove the folder here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Mapping

from shmserve.errors import Internal, InvalidArgument
from shmserve.log_fields import log_fields
from shmserve.transport import rundir

_log = logging.getLogger(__name__)


def write(
    run_dir: str, overrides: str, model: str, model_config: str, files: Mapping[str, bytes]
) -> None:
    """Make the folder `overrides`. On an error the folder is removed.

    Args:
        run_dir: the server's run directory.
        overrides: name of the folder, not used before.
        model: name of the model.
        model_config: configuration as JSON.
        files: content by relative path; the paths have been checked.

    Raises:
        InvalidArgument: a file's path is the folder of another file.
        Internal: the folder cannot be written.
    """
    folder = rundir.overrides(run_dir, overrides)
    try:
        _make(rundir.overrides(run_dir), "")
        os.mkdir(folder, 0o700)
        _write(os.path.join(folder, rundir.OVERRIDE_CONFIG), model_config.encode())
        for path, content in files.items():
            target = os.path.join(folder, model, path)
            _make(folder, os.path.dirname(os.path.join(model, path)))
            _write(target, content)
    except BaseException as ex:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(ex, FileExistsError | NotADirectoryError | IsADirectoryError):
            text = "the paths of two files of the request contradict each other"
            raise InvalidArgument(text) from None
        if isinstance(ex, OSError):
            about = log_fields(model=model, error=ex.strerror)
            _log.error("overrides cannot be written", extra=about)
            raise Internal("the files of the request cannot be stored") from None
        raise


def _make(folder: str, inside: str) -> None:
    """Make a folder and folders inside, for this user only, regardless of the umask."""
    for part in ["", *filter(None, inside.split("/"))]:
        folder = os.path.join(folder, part)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)


def _write(path: str, content: bytes) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(path, flags, 0o600), "wb") as file:
        file.write(content)
