"""Command ``shmserve serve``: execs the keeper, which runs gunicorn with shmserve's configuration
file."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import NoReturn

from shmserve import config
from shmserve.cli.serving import serve_options, shipped
from shmserve.errors import ConfigError
from shmserve.supervisor.generations import activation, keeper
from shmserve.transport.processes import adopt_orphans, undo_parents_state

_NAME = "gunicorn.conf.py"
# -P: a file `queue.py` in the working directory may be a model
_PYTHON = (sys.executable, "-P", "-m")
# gunicorn enters the directory by path
_DIRECTORY = "the working directory has been removed or is closed to this user: start in another"


def conf_file() -> str:
    """Return the path of gunicorn's configuration file; raises as `shipped`."""
    return str(shipped(_NAME, _NAME, f"{_NAME} is"))


def command(extra: Sequence[str]) -> list[str]:
    """Return the command to exec, with additional gunicorn options."""
    program = [*_PYTHON, "shmserve.supervisor.foreground"]
    return [*program, "-c", conf_file(), *extra, "shmserve.app"]


def main(arguments: argparse.Namespace) -> NoReturn:
    undo_parents_state()
    try:
        if not os.path.exists(os.readlink("/proc/self/cwd")):
            raise ConfigError(_DIRECTORY)
        for sentence in serve_options.take(arguments, os.environ):
            print(f"shmserve: {sentence}", file=sys.stderr, flush=True)
        settings = config.load()  # report wrong settings here, before gunicorn's own output
    except ConfigError as ex:
        activation.tell(os.environ, ex.message)
        raise
    os.environ[config.COMMAND_VARIABLE] = shlex.join(_called())
    words = command(arguments.gunicorn)
    # otherwise a handover within a keeper starts the next master
    if keeper.VARIABLE not in os.environ:
        adopt_orphans()  # lasts beyond the exec; the keeper itself imports no ctypes
        run_dir = config.base_dir(settings)
        given = [f"shmserve: keeper ({run_dir})", run_dir, str(settings.master_silence_s)]
        given.append(shlex.join(_called()))
        words = [*_PYTHON, "shmserve.supervisor.generations.keeper", *given, *words]
    os.execv(words[0], words)


def _called() -> list[str]:
    """Return the command as called: by a name that may be a link with another target later."""
    script, *words = sys.argv
    if os.path.basename(script) == "__main__.py":
        safe = ["-P"] if sys.flags.safe_path else []
        return [sys.executable, *safe, "-m", "shmserve", *words]
    return [os.path.abspath(script), *words]
