"""Trials of ``shmserve check``: compiles a model's code, and with ``--load`` loads each model once
in a separate process, without serving. Texts have paths, which are for operators alone.

Run as a program (``python -m shmserve.cli.inspecting.try_load``), the module loads the instance
given on standard input. On failure, the program prints the reason.
"""

import argparse
import logging
import os
import re
import subprocess
import sys
import traceback
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from shmserve import config
from shmserve.config import Settings
from shmserve.errors import ConfigError, ShmserveError
from shmserve.executor.process import environments
from shmserve.executor.process.environments import Environment
from shmserve.protocol.control import messages
from shmserve.protocol.control.link_messages import Instance
from shmserve.transport.processes import describe_status

_MODULE = "shmserve.cli.inspecting.try_load"
_WARNING = re.compile(r"^\S+ \S+ WARNING check shmserve\.[\w.]+: (.*)", re.MULTILINE)
_MARK = "not loaded: "
_MOST_FILES, _MOST_CAUSES = 100, 10


def problem(instance: Instance, settings: Settings) -> tuple[str, list[str]]:
    """Return the reason why a model cannot be loaded, or "", and the warnings of the load. Raise
    ConfigError if the model's own environment cannot be used."""
    environment = environments.choose(instance, settings.allow_model_code)
    if environment is None or not environment.is_pack:
        return _tried(instance, environment, settings)
    try:
        # The service's folder of packs is no place for another user, such as root: the service
        # could not use what that user makes, and that user must not run what the service has made
        with TemporaryDirectory(prefix="shmserve-", ignore_cleanup_errors=True) as folder:
            apart = msgspec.structs.replace(settings, repository_cache_dir=folder)
            return _tried(instance, environment, apart)
    except OSError as ex:
        fault = f"no temporary folder (TMPDIR) for the pack: {ex.strerror}"
        raise environments.refusal(instance.spec.name, environment, fault) from None


def _tried(
    instance: Instance, environment: Environment | None, settings: Settings
) -> tuple[str, list[str]]:
    command, lock = [sys.executable, "-P", "-m", _MODULE], -1
    timeout_s = settings.load_timeout_s
    try:
        if environment is not None:
            folder, lock = environments.prepare(environment, settings)
            command = environments.command(folder, _MODULE)
        done = subprocess.run(
            command, input=messages.encode(instance), capture_output=True, timeout=timeout_s
        )
    except subprocess.TimeoutExpired:
        return f"the model did not load within {timeout_s:g} s (load_timeout_s)", []
    except (OSError, ConfigError) as ex:
        fault = ex.message if isinstance(ex, ConfigError) else environments.not_started(ex)
        raise environments.refusal(instance.spec.name, environment, fault) from None
    finally:
        environments.give_back(lock, settings)
    last = done.stdout.decode(errors="replace").rstrip().rpartition("\n")[2]
    if last.startswith(_MARK):
        return last.removeprefix(_MARK), []
    if done.returncode:
        how = describe_status(done.returncode)
        return f"the process ended while it loaded the model: {how}", []
    return "", _WARNING.findall(done.stderr.decode(errors="replace"))


def code_problem(folder: Path) -> str:
    """Return the first syntax error in the Python files of a version's folder, or "". Compiles the
    files without running them."""
    for path in sorted(folder.glob("*.py"))[:_MOST_FILES]:
        try:
            with warnings.catch_warnings(action="ignore"):
                compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        except SyntaxError as ex:
            # the link of a served file is temporary
            shown = os.path.realpath(path) if path.is_symlink() else path
            return f"{shown}, line {ex.lineno or 1}: {ex.msg}"
        except (OSError, ValueError) as ex:
            return f"{path}: {ex}"
    return ""


def _place(ex: BaseException | None, folders: tuple[str, ...]) -> str:
    """Return the place of an exception or its causes in the model's code: the innermost line, or
    the line of a syntax error. Return "" if no line of the model is involved."""
    location = ""
    inside = tuple(f"{os.path.realpath(folder)}/" for folder in folders)
    for _ in range(_MOST_CAUSES):
        if ex is None:
            break
        if isinstance(ex, SyntaxError) and ex.filename:
            return f"{ex.filename}, line {ex.lineno}: "
        for frame in traceback.extract_tb(ex.__traceback__):
            file = os.path.realpath(frame.filename)
            if os.path.isabs(frame.filename) and file.startswith(inside):
                location = f"{file}, line {frame.lineno}: "
        ex = ex.__cause__ or ex.__context__
    return location


def main() -> int:
    from shmserve.executor.devices import Devices
    from shmserve.executor.process import model_loading
    from shmserve.observe import log_output, logs
    from shmserve.shm.mappings import Mappings

    parser = argparse.ArgumentParser()
    parser.add_argument("--fault", default="")  # of `environment_start`
    fault = parser.parse_args().fault
    logs.setup("check", "warning")
    instance = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=Instance)
    permitted = config.load().allow_model_code
    try:
        if fault:
            environment = environments.choose(instance, permitted)
            raise environments.refusal(instance.spec.name, environment, fault)
        devices = Devices.of(instance.device, Mappings())
        backend, _ = model_loading.load(instance, devices, allow_model_code=permitted)
        backend.close()
    except Exception as ex:
        version = os.path.join(instance.directory, instance.spec.version)
        reason = _place(ex, (instance.directory, version)) + _reason(ex, instance.name)
        log_output.end()  # flushes the model's output first
        print(f"\n{_MARK}{reason}", file=sys.__stdout__, flush=True)
        return 1
    log_output.end()  # `problem` reads the warnings; `os._exit` would lose them
    return 0


def _reason(ex: Exception, instance: str) -> str:
    """Return the text of a failed load, with paths that clients would not see."""
    from shmserve.executor.backends.model_errors import describe, from_load, one_line

    error = from_load(ex, logging.getLogger(__name__), instance)
    cause = ex.__cause__ if error is ex else ex
    if cause is None or isinstance(cause, ShmserveError):
        return one_line(error.message)
    return one_line(error.message.replace(describe(cause), describe(cause, one_line)))


if __name__ == "__main__":
    status = main()
    os._exit(status)  # threads of a model's libraries must not keep the process alive
