"""One model's folder: its configuration, its versions, its labels."""

from __future__ import annotations

import os
import re

import msgspec
from msgspec import Struct

from shmserve import ids
from shmserve.errors import ConfigError
from shmserve.grps.protocol import model_parameters as grps_spec
from shmserve.grps.repository import project_files as grps_project
from shmserve.protocol.control.link_messages import Instance
from shmserve.protocol.triton_config import instance_groups, model_config
from shmserve.protocol.triton_config.instance_groups import InstanceGroup
from shmserve.protocol.triton_config.model_config import (
    MODEL_FILE_IN_FOLDER,
    MODEL_FILES,
    ModelConfig,
)
from shmserve.repository import placing
from shmserve.repository import text_files as files
from shmserve.tensor.spec import ModelSpec

CONFIG_FILE = "config.pbtxt"
MAX_CONFIG_BYTES = 1 << 20
MAX_LABEL_BYTES = 16 << 20

# No leading zeros: "1" and "01" would be the same version
_VERSION = re.compile(r"[1-9][0-9]{0,17}")


class ModelFolder(Struct, frozen=True):
    """A model that can be described.

    `specs` has one entry for each version to serve, ascending; `failures` tells of
    versions that should be served but cannot (version -> reason fit for clients).
    `directory` is absolute; `groups` by version, on this host's devices. A spec of an ONNX
    model may lack inputs and outputs: its executor completes it.
    """

    name: str
    directory: str
    config: ModelConfig
    specs: tuple[ModelSpec, ...]
    failures: dict[str, str]
    groups: dict[str, tuple[InstanceGroup, ...]]

    def instances(self, spec: ModelSpec | None = None) -> list[Instance]:
        """Every instance to run, of one version or of all of them."""
        return [
            Instance(
                name=ids.instance_name(self.name, one.version, index),
                spec=one,
                directory=self.directory,
                device=place.device,
                auto=place.auto,
            )
            for one in (self.specs if spec is None else (spec,))
            for index, place in enumerate(instance_groups.places(self.groups[one.version]))
        ]


def read_folder(directory: str, override: str | None = None) -> ModelFolder:
    """Describe the model in a folder; its name is the folder's.

    Args:
        directory: the model's folder.
        override: a configuration as JSON that stands in for config.pbtxt.

    Raises:
        ConfigError: the model cannot be served at all; the text is fit for clients.
    """
    directory = os.path.abspath(directory)
    name = os.path.basename(directory)
    if not ids.is_model_name(name):
        raise ConfigError(f"'{files.printable(name)}' is not a valid model name")
    try:
        present = _versions(directory) or ([1] if grps_project.is_plain(directory) else [])
    except OSError as ex:
        raise ConfigError(f"model '{name}': its folder cannot be read ({ex.strerror})") from None
    config = _config(directory, name, present, override)
    labels = read_labels(config, directory)
    placed = placing.groups_of(config)
    groups: dict[str, tuple[InstanceGroup, ...]] = {}
    specs: list[ModelSpec] = []
    failures: dict[str, str] = {}
    for version in config.version_policy.select(present):
        reason = _missing(directory, version, present, config)
        if reason:
            failures[str(version)] = reason
            continue
        try:
            spec, own = _completed(directory, config.spec(str(version), labels), placed)
        except ConfigError as ex:
            failures[str(version)] = ex.message
        else:
            specs.append(spec)
            groups[spec.version] = own
    if not specs and not failures:
        raise ConfigError(f"model '{name}': no version folder (a positive number) is there")
    return ModelFolder(name, directory, config, tuple(specs), failures, groups)


def read_labels(config: ModelConfig, directory: str) -> dict[str, tuple[str, ...]]:
    """Class names by output, of the outputs that have a label_filename.

    Raises:
        ConfigError: a file that is missing, too large, not text or outside of the folder.
    """
    return {
        output: _labels(directory, config.name, output, file)
        for output, file in config.label_files.items()
    }


def _versions(directory: str) -> list[int]:
    with os.scandir(directory) as entries:
        return sorted(
            int(entry.name)
            for entry in entries
            if _VERSION.fullmatch(entry.name) and files.is_folder(entry)
        )


def _config(directory: str, name: str, present: list[int], override: str | None) -> ModelConfig:
    guess = _guess_backend(directory, present)
    if override is not None:
        return model_config.parse_json(override, name, guess)
    path = os.path.join(directory, CONFIG_FILE)
    if not os.path.lexists(path):
        if guess not in (model_config.ONNXRUNTIME, model_config.PYTHON, model_config.GRPS):
            why = " (a TorchScript model does not tell its tensors)" if guess else ""
            raise ConfigError(f"model '{name}': {CONFIG_FILE} is missing{why}")
        return model_config.parse("", name, guess)
    text = files.read_text(path, MAX_CONFIG_BYTES, f"model '{name}': {CONFIG_FILE}")
    return model_config.parse(text, name, guess)


def _guess_backend(directory: str, present: list[int]) -> str:
    """The backend whose model file the newest version has, else ""."""
    for version in reversed(present):
        if grps_project.root_of(directory, str(version)):
            return model_config.GRPS
        for backend, file in MODEL_FILES.items():
            if os.path.exists(os.path.join(directory, str(version), file)):
                return backend
    return ""


def _completed(
    directory: str, spec: ModelSpec, groups: tuple[InstanceGroup, ...]
) -> tuple[ModelSpec, tuple[InstanceGroup, ...]]:
    """The spec and groups with what models that take GRPS messages, and GRPS projects, say."""
    if spec.backend == model_config.GRPS:
        project = grps_project.read(directory, spec.version, spec.name)
        groups = placing.groups_of_project(groups, project, spec.name)
        parameters = {**project.parameters, **spec.parameters}
        config = msgspec.json.decode(spec.config_json)
        config["model_transaction_policy"] = {"decoupled": True}
        spec = msgspec.structs.replace(
            spec,
            parameters=parameters,
            decoupled=True,
            config_json=msgspec.json.encode(config).decode(),
        )
    told = instance_groups.told(spec.config_json, groups)
    spec = msgspec.structs.replace(spec, config_json=told)
    return grps_spec.completed(spec), groups


def _missing(directory: str, version: int, present: list[int], config: ModelConfig) -> str:
    """Why a version cannot be served, else ""."""
    if version not in present:
        return f"version {version} is not in the repository"
    if config.backend == model_config.GRPS:
        return ""
    file = config.model_file
    path = os.path.join(directory, str(version), file)
    if os.path.isdir(path):  # a model with its parts: the file of the same name inside
        path = os.path.join(path, MODEL_FILE_IN_FOLDER)
    if not os.path.isfile(path):
        return f"version {version} has no file '{file}'"
    if not os.access(path, os.R_OK):
        return f"version {version}: file '{file}' cannot be read"
    return ""


def _labels(directory: str, name: str, output: str, file: str) -> tuple[str, ...]:
    """Class names by index, one a line; blank lines at the end do not count."""
    what = f"model '{name}': label_filename '{file}' of output '{output}'"
    path = os.path.join(directory, file)
    if not files.is_inside(path, directory):
        raise ConfigError(f"{what} is not inside the model's folder")
    text = files.read_text(path, MAX_LABEL_BYTES, what)
    return tuple(line.strip() for line in text.rstrip().splitlines())
