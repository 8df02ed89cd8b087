"""Environments of models: a model may bring a Python with packages.

Every executor begins in the server's Python, by a fork of the template or by exec. `enter` chooses
the model's environment, and replaces the program by the environment's Python. The process keeps
pid, descriptors, limits and standard input. `environment_start` then checks the packages and runs
the executor with the server's code.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata
from typing import NoReturn

from msgspec import Struct

from shmserve import model_places
from shmserve.config import Settings
from shmserve.errors import ConfigError
from shmserve.executor.backends.model_errors import one_line
from shmserve.executor.process import environment_start
from shmserve.protocol.control.link_messages import Instance
from shmserve.protocol.triton_config.backend_kinds import PYTHON
from shmserve.repository import packs
from shmserve.repository.folder_reader import version_folder
from shmserve.transport.processes import describe_status

PARAMETER = "EXECUTION_ENV_PATH"
FOLDER = ".venv"
REQUIREMENTS = "requirements.txt"
_TRITON_DIRECTORY = "$$TRITON_MODEL_DIRECTORY"
_TRIAL_S = 10.0
_REMARK_LINE = re.compile(r"^[ \t]*#.*", re.MULTILINE)  # never continued
_REMARK = re.compile(r"(^|\s)(#|--?\w).*")  # remarks, and options of pip
_CODE_BACKENDS = (PYTHON, "grps")  # backends of models in Python code
_FAULTS = {
    errno.ENOENT: "its interpreter bin/python, or what bin/python leads to, is missing",
    errno.ENOTDIR: "it is no folder",
    errno.ENOEXEC: "its interpreter bin/python is not for this machine",
    errno.EACCES: "its interpreter bin/python may not be executed",
}


class Environment(Struct, frozen=True):
    """Environment of a model.

    Attributes:
        name: name of the file or parameter, for errors.
        place: path of the folder or the pack.
        remedy: advice for operators, or "".
    """

    name: str
    place: str
    remedy: str = ""

    @property
    def is_pack(self) -> bool:
        """True if the environment must be unpacked."""
        return self.name != FOLDER and not os.path.isdir(self.place)


def choose(instance: Instance, allow_model_code: bool) -> Environment | None:
    """Return the environment of an instance's model, or None if the server's Python runs the model.
    Raise ConfigError if the environment is missing, or needs the setting `allow_model_code`."""
    spec, folders = instance.spec, _folders(instance)
    environment = _named(instance, folders) or _built(folders)
    if environment is None or os.path.realpath(environment.place) == os.path.realpath(sys.prefix):
        return None
    if spec.backend in _CODE_BACKENDS or allow_model_code:
        return environment
    raise ConfigError(
        f"model '{spec.name}': {environment.name} brings code: the setting allow_model_code must"
        " be true"
    )


def unmet(instance: Instance) -> str:
    """Return advice if the model has a requirements.txt that the packages here do not meet, or "".
    The model may run all the same, so this is no error."""
    for folder in _folders(instance):
        if lacking := _lacking(os.path.join(folder, REQUIREMENTS)):
            return f"{REQUIREMENTS} wants {lacking}: {_remedy(folder)}"
    return ""


def _folders(instance: Instance) -> tuple[str, str]:
    folder = version_folder(instance.directory, instance.spec.version)
    return folder, instance.directory


def _named(instance: Instance, folders: tuple[str, ...]) -> Environment | None:
    given = instance.spec.parameters.get(PARAMETER)
    if not given:
        return None
    for folder in reversed(folders):
        place = os.path.join(folder, given.replace(_TRITON_DIRECTORY, folder))
        if os.path.exists(place):
            return Environment(f"parameters.{PARAMETER}", place)
    raise ConfigError(
        f"model '{instance.spec.name}': parameters.{PARAMETER} is '{given}': there is no such file"
        " or folder"
    )


def _built(folders: tuple[str, ...]) -> Environment | None:
    for folder in folders:
        place = os.path.join(folder, FOLDER)
        if os.path.lexists(place):
            return Environment(FOLDER, place, _remedy(folder))
    return None


def _remedy(folder: str) -> str:
    return f"run `shmserve env build {shlex.quote(os.path.realpath(folder))}`"


def _lacking(path: str) -> str:
    """Return the first requirement of a file that the packages here do not meet, or "". Skip
    options of pip, paths and addresses: nothing here tells whether they are met."""
    try:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            text = _REMARK_LINE.sub("", file.read()).replace("\\\n", "")
    except OSError:
        return ""
    from packaging.requirements import Requirement  # not in environments

    for line in text.splitlines():
        line = " ".join(_REMARK.sub("", line).split())
        try:
            wanted = Requirement(line)
            if wanted.marker is not None and not wanted.marker.evaluate():
                continue
            told = wanted.name if wanted.url else line  # addresses may hold a password
            found = metadata.version(wanted.name)
            # half-removed packages have no version
            if found and not wanted.specifier.contains(found, prereleases=True):
                return f"{told}, and the server has {found}"
        except metadata.PackageNotFoundError:
            return f"{told}, which the server does not have"
        except ValueError:  # no requirement, or no version, of the standard
            continue
    return ""


def prepare(environment: Environment, settings: Settings) -> tuple[str, int]:
    """Return the folder of an environment, and the lock for `give_back`. Raise ConfigError if a
    pack cannot be unpacked, or if the environment's Python does not start."""
    # `env build` moves the link `.venv`: running executors must go on to import from one folder
    folder, lock = os.path.realpath(environment.place), -1
    if environment.is_pack:
        until = time.monotonic() + settings.load_timeout_s
        most = settings.repository_cache_bytes
        folder, lock = packs.acquire(environment.place, _root(settings), most, until)
    if fault := _start_fault(folder):
        give_back(lock, settings)
        raise ConfigError(fault)
    return folder, lock


def _start_fault(folder: str) -> str:
    """Return why an environment's Python does not start, in words of this Python, or "". An
    executor that has become this Python could not tell any more."""
    try:
        done = subprocess.run(
            command(folder),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            timeout=_TRIAL_S,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""  # the executor's own start tells errors, and has its own deadline
    if done.returncode <= 0:  # a signal may be a lack of memory: the next start may succeed
        return ""
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    named = [line for line in lines if "rror" in line]  # a crash ends with a stack
    said = "".join(f": {one_line(line)}" for line in (named or lines)[-1:])
    return f"its interpreter bin/python ends with {describe_status(done.returncode)}{said}"


def give_back(lock: int, settings: Settings) -> None:
    """Unlock an unpacked pack, and remove unused packs. -1: no pack."""
    if lock >= 0:
        os.close(lock)
        packs.sweep(_root(settings))


def _root(settings: Settings) -> str:
    return packs.folder_in(model_places.cache_dir(settings))


def command(folder: str, *module: str) -> list[str]:
    """Return the command that runs a module of shmserve, with arguments, in the environment in
    `folder`, and writes no bytecode there. Without a module, the command only starts Python."""
    first = os.path.abspath(environment_start.__file__)
    python = os.path.join(folder, "bin", "python")
    return [python, "-I", "-B", first, *((sys.executable, *module) if module else ())]


def not_started(ex: OSError) -> str:
    """Return the reason of a failed exec of an environment's Python."""
    return _FAULTS.get(ex.errno or 0, f"its interpreter bin/python cannot run: {ex.strerror}")


def refusal(model: str, environment: Environment | None, fault: str) -> ConfigError:
    """Return the error for an unusable environment. `fault`: the reason."""
    name = environment.name if environment is not None else "its environment"
    remedy = f": {environment.remedy}" if environment is not None and environment.remedy else ""
    return ConfigError(f"model '{model}': {name} cannot be used: {fault}{remedy}")


def set_title(title: str) -> None:
    """Set the process's title for `ps`, unless the environment lacks setproctitle."""
    with suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(title)


def enter(
    instance: Instance, settings: Settings, words: list[str], keep: int, fault: str | None
) -> ConfigError | None:
    """Replace this program by an executor in the environment of the instance's model. Return None
    if the right Python runs already, or an error if the environment cannot be used.

    Args:
        words: the executor's arguments.
        keep: a descriptor that the executor inherits.
        fault: None at first; "" in the environment's Python; after a failure there, the reason.
    """
    if fault == "":
        return None
    try:
        environment = choose(instance, settings.allow_model_code)
    except ConfigError as ex:
        return ex
    if environment is None:
        return None
    try:
        reason = fault or _exec(environment, settings, words, keep)
    except ConfigError as ex:
        reason = ex.message
    return refusal(instance.spec.name, environment, reason)


def note(
    log: logging.Logger, instance: Instance, fault: str | None, refusal: ConfigError | None
) -> None:
    """Log what runs the model. `fault` and `refusal`: argument and result of `enter`."""
    if fault == "":
        log.info("runs in the model's own environment: Python %s", platform.python_version())
    elif refusal is None and (advice := unmet(instance)):
        log.warning("%s", advice)


def _exec(environment: Environment, settings: Settings, words: list[str], keep: int) -> NoReturn:
    folder, lock = prepare(environment, settings)
    line = command(folder, "shmserve.executor.process.__main__", *words, "--pack-lock", str(lock))
    for fd in {keep, lock} - {-1}:
        os.set_inheritable(fd, True)
    os.lseek(0, 0, os.SEEK_SET)  # the next program reads the instance again
    try:
        os.execv(line[0], line)
    except OSError as ex:
        give_back(lock, settings)
        raise ConfigError(not_started(ex)) from None
