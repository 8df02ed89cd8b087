"""A model's folder: configuration, versions, labels."""

import os
import re
from importlib import util

from msgspec import Struct
from msgspec.structs import replace

from shmserve import extensions, ids
from shmserve.errors import ConfigError
from shmserve.observe import gpus
from shmserve.protocol.control.link_messages import Instance
from shmserve.protocol.triton_config import instance_groups, model_config
from shmserve.protocol.triton_config.backend_kinds import BUILT_IN, RUNTIMES, BackendKind
from shmserve.protocol.triton_config.instance_groups import InstanceGroup
from shmserve.protocol.triton_config.model_config import ModelConfig
from shmserve.repository import folder_reader, mlserver_settings, text_files
from shmserve.repository.folder_reader import CONFIG_FILE, FolderReader
from shmserve.tensor.spec import ModelSpec

Readers = dict[str, FolderReader]  # by backend
MAX_CONFIG_BYTES = 1 << 20
MAX_LABEL_BYTES = 16 << 20

# No leading zeros: "1" and "01" would be the same version
_VERSION = re.compile(r"[1-9][0-9]{0,17}")
_NO_TENSORS = (
    " (a TorchScript model does not tell its tensors: write backend, input and output there)"
)


class ModelFolder(Struct, frozen=True):
    """A model whose folder could be read.

    Attributes:
        directory: absolute path.
        specs: specs of the versions to serve, ascending. The spec of an ONNX model may lack inputs
            and outputs, which the executor completes.
        failures: by version to serve, the reason for clients why the version cannot be served.
        groups: instance groups by version, on this host's devices.
    """

    name: str
    directory: str
    config: ModelConfig
    specs: tuple[ModelSpec, ...]
    failures: dict[str, str]
    groups: dict[str, tuple[InstanceGroup, ...]]

    def instances(self, spec: ModelSpec | None = None) -> list[Instance]:
        """Return the instances to run for one version, or for all versions if `spec` is None."""
        return [
            Instance(
                name=ids.instance_name(self.name, version_spec.version, index),
                spec=version_spec,
                directory=self.directory,
                device=place.device,
                auto=place.auto,
            )
            for version_spec in (self.specs if spec is None else (spec,))
            for index, place in enumerate(instance_groups.places(self.groups[version_spec.version]))
        ]


def read_folder(directory: str, override: str | None = None) -> ModelFolder:
    """Read the model in a folder. The folder's name is the model's name. `override`: configuration
    as JSON, used in place of config.pbtxt. Raise ConfigError, with a text fit for clients, if no
    version of the model can be served."""
    directory = os.path.abspath(directory)
    name = os.path.basename(directory)
    fault = ids.model_name_fault(name)
    if fault:
        raise ConfigError(f"'{text_files.printable(name)}' is not a valid model name, {fault}")
    readers = folder_reader.readers()
    present = _versions(directory, name, readers)
    config = _config(directory, name, present, readers, override)
    labels = read_labels(config, directory)
    placed = _groups_of(config, readers[config.backend].kind)
    groups: dict[str, tuple[InstanceGroup, ...]] = {}
    specs: list[ModelSpec] = []
    failures: dict[str, str] = {}
    for version in config.version_policy.select(present):
        try:
            reason = f"version {version} is not in the repository"
            if version in present:
                reason = readers[config.backend].missing(directory, version, config)
            if reason:
                raise ConfigError(reason)
            spec, own = _completed(directory, config.spec(str(version), labels), placed, readers)
        except ConfigError as ex:
            failures[str(version)] = ex.message
        else:
            specs.append(spec)
            groups[spec.version] = own
    if not specs and not failures:
        files = (file for kind in BUILT_IN.values() for file in kind.files)
        found = next((f for f in files if os.path.exists(os.path.join(directory, f))), "")
        remedy = f": move {found} to 1/{found}" if found else ""
        remedy = ": an ensemble needs an empty folder '1'" if config.steps else remedy
        text = f"model '{name}': no version folder (a positive number) is there{remedy}"
        raise ConfigError(text)
    return ModelFolder(name, directory, config, tuple(specs), failures, groups)


def looks_like_model(directory: str) -> bool:
    """Return True if a folder has a configuration or a version, or cannot be read."""
    try:
        with os.scandir(directory) as entries:
            has_model = any(e.name == CONFIG_FILE or _VERSION.fullmatch(e.name) for e in entries)
    except OSError:
        return True  # `read_folder` reports the reason
    readers = folder_reader.readers()
    return has_model or any(reader.plain_versions(directory) for reader in readers.values())


def read_labels(config: ModelConfig, directory: str) -> dict[str, tuple[str, ...]]:
    """Return class names by output, for outputs with a label_filename."""
    return {
        output: _labels(directory, config.name, output, file)
        for output, file in config.label_files.items()
    }


def _versions(directory: str, name: str, readers: Readers) -> list[int]:
    try:
        with os.scandir(directory) as entries:
            versions = sorted(
                int(entry.name)
                for entry in entries
                if _VERSION.fullmatch(entry.name) and text_files.is_folder(entry)
            )
    except OSError as ex:
        raise ConfigError(f"model '{name}': its folder cannot be read ({ex.strerror})") from None
    plain = (reader.plain_versions(directory) for reader in readers.values())
    if versions and not folder_reader.is_mlservers(directory):
        return versions
    for version in versions:
        if os.path.lexists(os.path.join(directory, str(version), mlserver_settings.FILE)):
            raise ConfigError(
                f"model '{name}': {mlserver_settings.FILE} is in its folder and in folder"
                f" '{version}': remove the one that is not to be served"
            )
    return next(filter(None, plain), versions)


def _config(
    directory: str, name: str, present: list[int], readers: Readers, override: str | None
) -> ModelConfig:
    kinds = folder_reader.kinds()
    guess = _guess(directory, present, readers)
    backend = guess.kind.name if guess else ""
    if override is not None:
        return model_config.parse_json(override, name, backend, kinds=kinds)
    if folder_reader.has_config(directory):
        path = os.path.join(directory, CONFIG_FILE)
        text = text_files.read_text(path, MAX_CONFIG_BYTES, f"model '{name}': {CONFIG_FILE}")
        return model_config.parse(text, name, backend, kinds)
    if guess is None or not guess.config_optional(directory, present):
        hint = _NO_TENSORS if backend == "pytorch" else ""
        raise ConfigError(f"model '{name}': {CONFIG_FILE} is missing{hint}")
    own = guess.configuration(directory, present)
    return model_config.parse_dict(own, name, backend, kinds=kinds)


def _guess(directory: str, present: list[int], readers: Readers) -> FolderReader | None:
    """Return the reader that recognises the newest version, asking extensions first, and runtimes
    last, because a file of a runtime may lie beside a model.py."""
    ordered = sorted(
        readers.values(),
        key=lambda reader: (reader.kind.name in RUNTIMES, reader.kind.name in BUILT_IN),
    )
    for version in reversed(present):
        for reader in ordered:
            if reader.recognises(directory, version):
                return reader
    return None


def _completed(
    directory: str, spec: ModelSpec, groups: tuple[InstanceGroup, ...], readers: Readers
) -> tuple[ModelSpec, tuple[InstanceGroup, ...]]:
    """Return the spec and groups, completed from the model's files and parameters."""
    own = readers[spec.backend]
    if spec.config.model_file:
        file = own.model_file(directory, spec.version, spec.config.model_file)
        spec = replace(spec, config=replace(spec.config, default_model_filename=file))
    spec, groups = own.completed(directory, spec, groups)
    spec = replace(spec, config=instance_groups.shown(spec.config, groups))
    for reader in extensions.concerned(extensions.FOLDER_READERS, spec.parameters):
        spec = reader.with_parameters(spec)
    return spec, groups


def _labels(directory: str, name: str, output: str, file: str) -> tuple[str, ...]:
    """Return class names by index, one per line. Blank lines at the end do not count."""
    what = f"model '{name}': label_filename '{file}' of output '{output}'"
    path = os.path.join(directory, file)
    if not text_files.is_inside(path, directory):
        raise ConfigError(f"{what} is not inside the model's folder")
    text = text_files.read_text(path, MAX_LABEL_BYTES, what)
    return tuple(line.strip() for line in text.rstrip().splitlines())


def _groups_of(config: ModelConfig, kind: BackendKind) -> tuple[InstanceGroup, ...]:
    """Return a configuration's groups on this host's devices. Raise ConfigError if a device is
    missing, or software that the backend needs for the device."""
    visible = len(gpus.visible_devices())
    cupy = util.find_spec("cupy") is not None  # only executors import CuPy
    return instance_groups.placed(config.instance_groups, config.name, kind, visible, cupy)
