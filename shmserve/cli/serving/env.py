"""Command ``shmserve env build FOLDER``: makes a model's own environment, `.venv` in its folder.

`.venv` is a link to a folder `.venv-<number>`. The command builds and tries a new folder beside the
old folder, and replaces the link only after success. The former folder stays for running executors.
The command removes older folders.
"""

import argparse
import contextlib
import fcntl
import os
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator

from shmserve.errors import ConfigError
from shmserve.executor.process import environment_start, environments

_REPORT = "shmserve.cli.serving.env_report"
_TITLES = "setproctitle>=1.3"  # not needed: names the executor for `ps`
_OURS = re.compile(r"\.venv-[0-9a-f]{8}")
_OLD = "import sys; sys.exit(sys.version_info < {})"


def main(arguments: argparse.Namespace) -> int:
    """Build the environment, print the packages, and return the exit status. Raise ConfigError
    after a failure. A failure leaves an existing environment unchanged."""
    folder = arguments.folder
    if not os.path.isdir(folder):
        raise ConfigError(f"{folder} is no folder")
    oldest = environment_start.OLDEST
    if _run([arguments.python, "-I", "-c", _OLD.format(oldest)]):
        version = ".".join(map(str, oldest))
        raise ConfigError(f"{arguments.python} cannot be used: it is no Python {version} or newer")
    try:
        with _locked(folder):
            _make(folder, arguments.python)
    except OSError as ex:
        raise ConfigError(f"{folder}: {ex.strerror}") from None
    print(f"{os.path.join(folder, environments.FOLDER)} is made: load the model again to use it")
    return 0


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Keep other builds out of a folder: each removes the unfinished folders of others. The kernel
    unlocks the folder of a killed command."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            reason = "another `shmserve env build` is under way there: wait for its end"
            raise ConfigError(f"{folder}: {reason}") from None
        yield
    finally:
        os.close(fd)


def _make(folder: str, python: str) -> None:
    fresh = f"{environments.FOLDER}-{secrets.token_hex(4)}"
    try:
        _build(folder, fresh, python)
        former = _replace(folder, fresh)
    except BaseException:
        shutil.rmtree(os.path.join(folder, fresh), ignore_errors=True)
        raise
    for name in os.listdir(folder):
        if _OURS.fullmatch(name) and name not in (fresh, former):
            shutil.rmtree(os.path.join(folder, name), ignore_errors=True)


def _build(folder: str, name: str, python: str) -> None:
    place = os.path.abspath(os.path.join(folder, name))
    if _run([python, "-I", "-m", "venv", place]):
        raise ConfigError(f"{python} cannot make an environment (see above)")
    wanted = [environment_start.requirement(*row[1:]) for row in environment_start.NEEDED]
    if os.path.exists(os.path.join(folder, environments.REQUIREMENTS)):
        wanted += ["-r", environments.REQUIREMENTS]
    pip = [os.path.join(place, "bin", "python"), "-I", "-m", "pip", "--disable-pip-version-check"]
    if _run([*pip, "install", _TITLES, *wanted], folder):
        raise ConfigError("pip cannot install the packages (see above); nothing has changed")
    if _run(environments.command(place, _REPORT)):
        raise ConfigError("the new environment cannot run executors; nothing has changed")


def _run(command: list[str], folder: str | None = None) -> int:
    """Run a command with output to the terminal. Return the exit status."""
    sys.stdout.flush()
    try:
        return subprocess.run(command, cwd=folder, stdin=subprocess.DEVNULL).returncode
    except OSError as ex:
        raise ConfigError(f"{command[0]} cannot be run: {ex.strerror}") from None


def _replace(folder: str, fresh: str) -> str:
    """Let `.venv` lead to the fresh folder. Return the name of the former folder, or ""."""
    link = os.path.join(folder, environments.FOLDER)
    with contextlib.suppress(FileNotFoundError):  # left by a killed command
        os.unlink(f"{link}-new")
    os.symlink(fresh, f"{link}-new")
    if os.path.isdir(link) and not os.path.islink(link):  # made by hand
        former = f"{environments.FOLDER}-{secrets.token_hex(4)}"
        os.rename(link, os.path.join(folder, former))
    else:
        former = os.readlink(link) if os.path.islink(link) else ""
    os.replace(f"{link}-new", link)
    return former
