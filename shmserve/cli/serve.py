"""``shmserve serve``: become gunicorn with our configuration file."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from shmserve import config
from shmserve.errors import ConfigError
from shmserve.supervisor import activation

_NAME = "gunicorn.conf.py"


def conf_file() -> str:
    """The configuration file: in a wheel inside of the package, in a checkout beside it."""
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for folder in (package, os.path.dirname(package)):
        path = os.path.join(folder, _NAME)
        if os.path.isfile(path):
            return path
    raise ConfigError(f"{_NAME} is missing from this installation")


def command(extra: Sequence[str]) -> list[str]:
    """What to exec; gunicorn's own options may follow."""
    return [sys.executable, "-m", "gunicorn", "-c", conf_file(), *extra, "shmserve.app"]


def main(arguments: argparse.Namespace) -> NoReturn:
    try:
        config.load()  # what is wrong with them is told here, before gunicorn begins to speak
    except ConfigError as ex:
        activation.tell(os.environ, ex.message)
        raise
    os.environ[config.COMMAND_VARIABLE] = shlex.join(_called())
    run(arguments.gunicorn)


def _called() -> list[str]:
    """This command, by the name that it was called with: a link may lead elsewhere by and by."""
    script, *words = sys.argv
    if os.path.basename(script) == "__main__.py":
        return [sys.executable, "-m", "shmserve", *words]
    return [os.path.abspath(script), *words]


def run(extra: Sequence[str]) -> NoReturn:
    """Replace this process by the gunicorn master."""
    words = command(extra)
    os.execv(words[0], words)
