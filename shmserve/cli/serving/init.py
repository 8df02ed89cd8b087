"""Command ``shmserve init DIR``: makes a model repository with the example workers, and a settings
file."""

from __future__ import annotations

import argparse
import importlib.util
import json
import shutil
from pathlib import Path

from shmserve.errors import ConfigError

_EXAMPLES = ("add_sub", "digits", "identity", "identity_bytes", "noop", "repeat_int32")
_NEEDS = {"digits": "onnxruntime"}  # packages installed by pip with shmserve[onnx]
_FILE = "shmserve.toml"
_SETTINGS = """\
# `shmserve settings` shows the settings in effect, `shmserve check` finds errors.

model_repository = [{repository}]
# model_control = "explicit"        # clients load and unload models; "poll": the folder decides
# load_models = ["*"]               # with "explicit": models to load at the start
# pool_bytes = "1GiB"               # all shared memory; default: half of /dev/shm

[http]
bind = ["127.0.0.1:8000"]           # and "unix:/PATH", for programs on this host
workers = 2

[grpc]
bind = ["127.0.0.1:8001"]
processes = 1
"""


def main(arguments: argparse.Namespace) -> int:
    """Make the repository and the file, print the next steps, and return the exit status.

    Raises:
        ConfigError: the folder is not empty, or cannot be made.
    """
    folder = Path(arguments.folder).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise ConfigError(f"{arguments.folder} is not empty")
        names = [name for name in _EXAMPLES if _can_run(name)]
        repository = folder / "workers"
        for name in names:
            skipped = shutil.ignore_patterns("training", "__pycache__")
            shutil.copytree(examples() / name, repository / name, ignore=skipped)
        text = _SETTINGS.format(repository=json.dumps(str(repository)))
        (folder / _FILE).write_text(text, encoding="utf-8")
    except OSError as ex:
        raise ConfigError(f"{arguments.folder}: {ex.strerror}") from None
    print(f"{folder}: {_FILE} and the models {', '.join(names)}")
    for name in sorted(set(_EXAMPLES) - set(names)):
        print(f"without {name}, which needs {_NEEDS[name]}: pip install 'shmserve[onnx]'")
    print(f"serve them:  shmserve --config {folder / _FILE} serve")
    return 0


def _can_run(name: str) -> bool:
    return name not in _NEEDS or importlib.util.find_spec(_NEEDS[name]) is not None


def examples() -> Path:
    """Return the folder of the example workers: inside the package in a wheel, beside the package
    in a checkout.

    Raises:
        ConfigError: the folder is missing.
    """
    package = Path(__file__).absolute().parents[2]
    for folder in (package, package.parent):
        if (folder / "workers").is_dir():
            return folder / "workers"
    raise ConfigError("the example workers are missing from this installation")
