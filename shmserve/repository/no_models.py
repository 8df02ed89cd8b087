"""Folders without a model: explanations for operators, with a remedy each."""

import os
import re
from itertools import islice

from shmserve import ids
from shmserve.errors import ConfigError
from shmserve.protocol.triton_config import backend_kinds
from shmserve.repository import mlserver_settings
from shmserve.repository.folder_reader import CONFIG_FILE
from shmserve.repository.mlserver_settings import FILE, ModelSettings
from shmserve.repository.model_folder import looks_like_model

_FILES = {
    os.path.splitext(file)[1]: file
    for kind in backend_kinds.BUILT_IN.values()
    for file in kind.files
}
_RUNTIME_FILES = [
    file
    for kind in backend_kinds.RUNTIMES.values()
    for file in kind.files
    if file != "config.json"  # may be anything
]
# models without need of a configuration
_DESCRIBED = (".py", ".onnx", backend_kinds.EXPORTED, *_RUNTIME_FILES)
_ALMOST_VERSION = re.compile(r"v?0*([1-9][0-9]{0,17})")
_MOST_NAMED = 4
_MOST_OPENED = 100  # folders within a folder
_REWRITE = (
    f"MLServer's {FILE} names an implementation that is not served here: write {CONFIG_FILE} and"
    " 1/model.py (docs/from_mlserver.md shows how)"
)


def of_mlserver(directory: str) -> str:
    """Return a remedy for a folder of MLServer's with an unsupported implementation, else ""."""
    settings = _mlserver(directory)
    return _REWRITE if settings and not settings.backend else ""


def _mlserver(directory: str) -> ModelSettings | None:
    try:
        return mlserver_settings.read(directory, os.path.basename(directory))
    except ConfigError:  # reported with the model
        return None


def name_of(directory: str) -> str:
    """Return the name of a model's own folder: MLServer's name, or the folder's."""
    settings = _mlserver(directory)
    return (settings and settings.name) or os.path.basename(directory)


def of_folder(directory: str) -> str:
    """Return the reason why a folder without configuration and version is no model."""
    files, folders = _listed(directory)
    if advice := of_mlserver(directory):
        return advice
    if file := _model_file(files):
        target = f"1/{_FILES.get(os.path.splitext(file)[1], file)}"
        needs = "" if file.endswith(_DESCRIBED) else f", and write {CONFIG_FILE}"
        return f"has {file}, but no version folder: move {file} to {target}{needs}"
    for name in folders:
        if match := _ALMOST_VERSION.fullmatch(name):
            return f"its folder '{name}' is no version: rename it to '{match[1]}'"
    few = (n for n in folders[:_MOST_OPENED] if looks_like_model(os.path.join(directory, n)))
    if named := ", ".join(islice(few, _MOST_NAMED)):
        return f"has folders of models ({named}), and is none: add its path to model_repository"
    wanted = " or ".join(f"1/{file}" for file in _FILES.values())
    return f"has neither {wanted} nor {CONFIG_FILE}"


def of_repository(directory: str) -> str:
    """Return why a repository's folder holds no models, if it is a model's own folder; else ""."""
    name = name_of(directory)
    name = name if ids.is_model_name(name) else "NAME"
    if advice := of_mlserver(directory):
        return f"is a model of MLServer's, and no folder of models: {advice} in a folder below it"
    if sign := sign_of_model(directory):
        return (
            f"is a model's own folder (it has {sign}), and no folder of models:"
            f" write '{name}={directory}' in model_repository, or name the folder above it"
        )
    return of_sources(directory)


def of_sources(directory: str) -> str:
    """Return how to serve a folder's Python files, if the folder has no folders; else ""."""
    files, folders = _listed(directory)
    sources = [file for file in files if file.endswith(".py")]
    if not sources or folders not in ([], ["__pycache__"]):
        return ""
    first, named = sources[0], ", ".join(sources[:_MOST_NAMED])
    return (
        f"has no folder of a model: {named} lie there: serve one with `shmserve serve {first}`,"
        " several with `shmserve serve ONE.py OTHER.py`, or with"
        f' model_repository = ["{first[:-3]}={first}", …]'
    )


def sign_of_model(directory: str) -> str:
    """Return a file by which a folder is a model's own folder; "" without such a file. A model file
    beside folders of models is no sign: it is a stray file of a repository."""
    files, folders = _listed(directory)
    inside = [
        f"{n}/{f}" for n in folders if n.isdigit() for f in (*_FILES.values(), *_RUNTIME_FILES)
    ]
    signs = [name for name in (CONFIG_FILE, FILE) if name in files]
    signs += [path for path in inside if os.path.exists(os.path.join(directory, path))]
    if signs:
        return signs[0]
    others = [name for name in folders if not name.isdigit()][:_MOST_OPENED]
    is_repository = any(looks_like_model(os.path.join(directory, name)) for name in others)
    return "" if is_repository else _model_file(files)


def _model_file(files: list[str]) -> str:
    """Return a possible model file of a backend, first by the backend's own file name."""
    named = [file for file in (*_FILES.values(), *_RUNTIME_FILES) if file in files]
    others = [f for f in files if os.path.splitext(f)[1] in _FILES.keys() - {".py"}]
    return next(iter([*named, *others]), "")


def _listed(directory: str) -> tuple[list[str], list[str]]:
    """Return the sorted names of files and of visible folders; empty if unreadable."""
    files, folders = [], []
    try:
        with os.scandir(directory) as entries:
            for entry in entries:
                if entry.is_file():
                    files.append(entry.name)
                elif entry.is_dir() and not entry.name.startswith("."):
                    folders.append(entry.name)
    except OSError:
        return [], []
    return sorted(files), sorted(folders)
