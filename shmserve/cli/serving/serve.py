"""``shmserve serve``: become the keeper of gunicorn with our configuration file."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

import shmserve
from shmserve import config
from shmserve.errors import ConfigError
from shmserve.supervisor.generations import activation, keeper
from shmserve.transport.processes import adopt_orphans

_NAME = "gunicorn.conf.py"


def conf_file() -> str:
    """The configuration file: in a wheel inside of the package, in a checkout beside it."""
    package = os.path.dirname(os.path.abspath(shmserve.__file__))
    for folder in (package, os.path.dirname(package)):
        path = os.path.join(folder, _NAME)
        if os.path.isfile(path):
            return path
    raise ConfigError(f"{_NAME} is missing from this installation")


def command(extra: Sequence[str]) -> list[str]:
    """What to exec; gunicorn's own options may follow."""
    program = [sys.executable, "-m", "shmserve.supervisor.foreground"]
    return [*program, "-c", conf_file(), *extra, "shmserve.app"]


def main(arguments: argparse.Namespace) -> NoReturn:
    try:
        settings = config.load()  # what is wrong is told here, before gunicorn begins to speak
    except ConfigError as ex:
        activation.tell(os.environ, ex.message)
        raise
    os.environ[config.COMMAND_VARIABLE] = shlex.join(_called())
    words = command(arguments.gunicorn)
    if keeper.VARIABLE not in os.environ:  # else a handover within a keeper starts the next master
        adopt_orphans()  # lasts beyond the exec; the keeper itself imports no ctypes
        title = f"shmserve: keeper ({config.base_dir(settings)})"
        words = [sys.executable, "-m", "shmserve.supervisor.generations.keeper", title, *words]
    os.execv(words[0], words)


def _called() -> list[str]:
    """This command, by the name that it was called with: a link may lead elsewhere by and by."""
    script, *words = sys.argv
    if os.path.basename(script) == "__main__.py":
        return [sys.executable, "-m", "shmserve", *words]
    return [os.path.abspath(script), *words]
