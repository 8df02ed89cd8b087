"""GRPS projects as workers: reads inference.yml and server.yml, and finds the project's folder.

A version of a worker may be a project (`<worker>/<version>/conf/inference.yml` and `src/`). The
worker's folder itself may be a project, too, as version 1.
"""

import os
import re
from typing import Any

from msgspec import Struct

from shmserve.core.scheduling.batch_policy import BatchPolicy
from shmserve.errors import ConfigError
from shmserve.grps.protocol import model_parameters
from shmserve.repository import text_files

MAX_BYTES = 32 * 1024  # both files travel in one message, and to GRPS clients
_INFERENCE = "inference.yml"
_SERVER = "server.yml"
_INFERERS = ("customized", "torch")
_CONVERTERS = ("customized", "torch", "none")
_GPU = re.compile(r"(?:original_)?(?:cuda|gpu)(?::([0-9]{1,4}))?")
# key of server.yml without effect -> the equivalent here
_ELSEWHERE = {
    "interface.framework": "the settings are http_bind and grpc_bind",
    "interface.host": "the settings are http_bind and grpc_bind",
    "interface.port": "the settings are http_bind and grpc_bind",
    "max_connections": "the setting is max_connections",
    "gpu": "GPU memory is neither limited nor collected here",
    "log": "the log goes to standard error, the setting is log_level",
}


class ProjectModel(Struct, frozen=True):
    """An entry of `models`. With `converter_type` "none", the inferer works on messages."""

    name: str  # name-version
    device: str
    inferer_type: str
    inferer_name: str
    inferer_path: Any  # as in the file: text, None, or "" for a missing key
    inferer_args: Any
    converter_type: str
    converter_name: str
    converter_path: Any
    converter_args: Any
    batching: BatchPolicy | None

    @property
    def gpu(self) -> int | None:
        """Return the number of the GPU that `device` names, or None if `device` names no GPU."""
        match = _GPU.fullmatch(self.device)
        return int(match[1] or 0) if match else None


class Project(Struct, frozen=True):
    """The contents of a project's files. `remarks`: entries without effect, for the log."""

    root: str
    models: tuple[ProjectModel, ...]
    dag: tuple[str, ...]  # names of models, in the order in which they run
    max_concurrency: int
    parameters: dict[str, str]  # as in config.pbtxt
    remarks: tuple[str, ...]


def root_of(directory: str, version: str) -> str:
    """Return the project's folder of a worker's version; "" if the version is no project."""
    candidates = [os.path.join(directory, version)]
    if version == "1":
        candidates.append(directory)
    return next((path for path in candidates if _inference_file(path)), "")


def is_plain(directory: str) -> bool:
    """Return True if the worker's folder is itself a project."""
    return bool(_inference_file(directory))


def read(directory: str, version: str, model: str) -> Project:
    """Read the project of a version. Raise ConfigError if the project cannot be served; the text is
    fit for clients."""
    root = root_of(directory, version)
    path = _inference_file(root) if root else ""
    if not path:
        raise ConfigError(f"model '{model}': version {version} has no file '{_INFERENCE}'")
    reader = _Reader(f"model '{model}': {_INFERENCE}")
    inference_text = text_files.read_text(path, MAX_BYTES, reader.what)
    entries = reader.list_of(reader.load(inference_text), "models")
    models = tuple(reader.model(entry) for entry in entries)
    names = [model.name for model in models]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{reader.what}: model '{name}' is there twice")
    dag = reader.dag(names)
    if any("customized" in (m.inferer_type, m.converter_type) for m in models) and not (
        os.path.isdir(os.path.join(root, "src"))
    ):
        raise ConfigError(f"model '{model}': version {version} has no folder 'src'")
    server_path = os.path.join(os.path.dirname(path), _SERVER)
    server_text = ""
    server = _Reader(f"model '{model}': {_SERVER}")
    if os.path.lexists(server_path):
        server_text = text_files.read_text(server_path, MAX_BYTES, server.what)
        server.load(server_text)
    parameters = {
        "grps": "message",
        "grps_version": dag[0].rpartition("-")[2],
        model_parameters.MODELS: ",".join(names),
        model_parameters.INFERENCE: inference_text,
        model_parameters.SERVER: server_text,
        **server.http(),
    }
    remarks = (*reader.remarks, *server.elsewhere())
    concurrency = server.positive(server.document, "max_concurrency", 32)
    return Project(root, models, dag, concurrency, parameters, remarks)


def _inference_file(root: str) -> str:
    for path in (os.path.join(root, "conf", _INFERENCE), os.path.join(root, _INFERENCE)):
        if os.path.isfile(path):
            return path
    return ""


class _Reader:
    """Reader of one file. Errors name the file and the field."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.document: dict[str, Any] = {}
        self.remarks: list[str] = []

    def load(self, text: str) -> dict[str, Any]:
        import yaml  # not in the environment of a model that is no project

        try:
            document = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as ex:
            mark = getattr(ex, "problem_mark", None)
            where = f" (line {mark.line + 1})" if mark is not None else ""
            raise ConfigError(f"{self.what} is not YAML{where}") from None
        if not isinstance(document, dict):
            raise ConfigError(f"{self.what} is not a mapping")
        self.document = document
        return document

    # ------------------------------------------------------- inference.yml

    def model(self, entry: dict[str, Any]) -> ProjectModel:
        name = f"{self.text(entry, 'name', True)}-{self.text(entry, 'version', True)}"
        what = f"{self.what}: model '{name}'"
        inferer = self._choice(what, entry, "inferer_type", _INFERERS)
        converter = self._choice(what, entry, "converter_type", _CONVERTERS)
        device = self.text(entry, "device").lower()
        if device == "original":
            device = f"original_{self.text(entry, 'inp_device').lower()}"
        if inferer == "customized" and device.startswith(("cuda", "gpu")):
            self.remarks.append(f"{what}: device '{device}' is left to the project's own code")
        known_keys = {
            *("name", "version", "device", "inp_device", "batching"),
            *(f"{part}_{key}" for part in ("inferer", "converter") for key in _PART),
        }
        self.remarks += [
            f"{what}: {key} means nothing" for key in entry if key not in known_keys and entry[key]
        ]
        return ProjectModel(
            name=name,
            device=device,
            inferer_type=inferer,
            inferer_name=self.text(entry, "inferer_name", inferer == "customized"),
            inferer_path=self.text(entry, "inferer_path") or entry.get("inferer_path", ""),
            inferer_args=entry.get("inferer_args", {}),
            converter_type=converter,
            converter_name=self.text(entry, "converter_name", converter == "customized"),
            converter_path=self.text(entry, "converter_path") or entry.get("converter_path", ""),
            converter_args=entry.get("converter_args", {}),
            batching=self._batching(what, entry),
        )

    def _choice(self, what: str, entry: dict[str, Any], key: str, allowed: tuple[str, ...]) -> str:
        value = self.text(entry, key, True)
        if value not in allowed:
            raise ConfigError(
                f"{what}: {key} '{value}' is not supported (supported: {', '.join(allowed)})"
            )
        return value

    def _batching(self, what: str, entry: dict[str, Any]) -> BatchPolicy | None:
        block = self.mapping(entry, "batching")
        if not block:
            return None
        kind = block.get("type")
        if kind not in ("none", "dynamic"):
            raise ConfigError(f"{what}: batching.type '{kind}' is not none or dynamic")
        size = self.positive(block, "max_batch_size")
        timeout_ns = self.positive(block, "batch_timeout_us") * 1000
        # A batch is due at this size, or at this time after its first request.
        return BatchPolicy(size, frozenset((size,)), timeout_ns) if kind == "dynamic" else None

    def dag(self, names: list[str]) -> tuple[str, ...]:
        block = self.mapping(self.document, "dag")
        if not block and len(names) == 1:
            return tuple(names)
        if block.get("type") != "sequential":
            raise ConfigError(f"{self.what}: dag.type '{block.get('type')}' is not sequential")
        nodes = []
        for node in self.list_of(block, "nodes"):
            if node.get("type") != "model":
                raise ConfigError(f"{self.what}: a node of the dag is no model")
            name = self.text(node, "model", True)
            if name not in names:
                raise ConfigError(f"{self.what}: the dag's model '{name}' is not among models")
            nodes.append(name)
        return tuple(nodes)

    # ---------------------------------------------------------- server.yml

    def http(self) -> dict[str, str]:
        """Return the model parameters from customized_predict_http."""
        block = self.mapping(self.mapping(self.document, "interface"), "customized_predict_http")
        if not block:
            return {}
        body = block.get("customized_body", False)
        if not isinstance(body, bool):
            raise ConfigError(f"{self.what}: customized_body is not true or false")
        parameters = {
            "grps_http_path": self.text(block, "path", True),
            "grps_http_body": "true" if body else "false",
        }
        control = self.mapping(block, "streaming_ctrl")
        for key, parameter in (
            ("ctrl_mode", "grps_streaming_ctrl_mode"),
            ("ctrl_key", "grps_streaming_ctrl_key"),
            ("res_content_type", "grps_streaming_ctrl_content_type"),
        ):
            if control.get(key):
                parameters[parameter] = self.text(control, key)
        return parameters

    def elsewhere(self) -> list[str]:
        remarks = []
        for path, instead in _ELSEWHERE.items():
            outer, _, inner = path.partition(".")
            block = self.mapping(self.document, outer) if inner else self.document
            if block.get(inner or outer) is not None:
                remarks.append(f"{self.what}: {path} is not used; {instead}")
        return remarks

    # --------------------------------------------------------------- fields

    def text(self, entry: dict[str, Any], key: str, needed: bool = False) -> str:
        value = entry.get(key)
        if value is None or value == "":
            if needed:
                raise ConfigError(f"{self.what}: {key} is missing")
            return ""
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            raise ConfigError(f"{self.what}: {key} is not text")
        return str(value)

    def mapping(self, entry: dict[str, Any], key: str) -> dict[str, Any]:
        value = entry.get(key)
        if value is None or value == "":
            return {}
        if not isinstance(value, dict):
            raise ConfigError(f"{self.what}: {key} is not a mapping")
        return value

    def list_of(self, entry: dict[str, Any], key: str) -> list[dict[str, Any]]:
        value = entry.get(key)
        if not isinstance(value, list) or not value or not all(isinstance(v, dict) for v in value):
            raise ConfigError(f"{self.what}: {key} is not a list of mappings")
        return value

    def positive(self, entry: dict[str, Any], key: str, default: int = 0) -> int:
        value = entry.get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(f"{self.what}: {key} '{value}' is not a positive number")
        return value


_PART = ("type", "name", "path", "args")
