"""config.pbtxt: text to a validated `ModelConfig`, and from there to `ModelSpec`s.

No field is ignored silently. An unsupported field is refused by name
(`shmserve.protocol.triton_config.field_table`), and so is a value that makes no sense.

From a folder to an executor: `repository` reads the folder, and this package checks config.pbtxt
against the tables of `field_table`. The result becomes a `ConfigDocument`
(`tensor.config_document`), which travels in the spec. The executor loads the backend. The backend
completes the fields that the configuration leaves to the model (an ONNX graph,
`auto_complete_config`) and returns the spec to publish. If the configuration has reshapes, the
loaded backend is wrapped once (`executor.backends.reshape`). The warm-up runs the samples, and then
the instance is READY.
"""

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf import json_format, text_format
from msgspec import Struct

from shmserve._generated import model_config_pb2 as pb
from shmserve.core.control.memory_bounds import MAX_MEMORY
from shmserve.core.scheduling import ensemble_graph
from shmserve.errors import ConfigError
from shmserve.protocol.triton_config import near_names
from shmserve.protocol.triton_config.backend_kinds import (
    BUILT_IN,
    ENSEMBLE,
    ONNXRUNTIME,
    RUNTIMES,
    BackendKind,
)
from shmserve.protocol.triton_config.batching import check_batch_tensors, check_batching
from shmserve.protocol.triton_config.config_parts import (
    VersionPolicy,
    ensemble_steps,
    is_plain_file_name,
    label_files,
    tensors,
    version_policy,
)
from shmserve.protocol.triton_config.document import document_of
from shmserve.protocol.triton_config.field_table import refuse_unsupported, without_effect
from shmserve.protocol.triton_config.instance_groups import InstanceGroup, instance_groups
from shmserve.protocol.triton_config.sequences import check_sequences
from shmserve.protocol.triton_config.warmup_samples import WarmupSample, warmup_samples
from shmserve.settings import kinds as setting_kinds
from shmserve.tensor.config_document import ConfigDocument
from shmserve.tensor.spec import EnsembleStep, ModelSpec, TensorSpec

_GRAPH_LEVELS = (-1, 0, 1, 2)  # onnxruntime's levels: basic, all, extended, none


class ModelConfig(Struct, frozen=True):
    """A validated configuration, common to all versions of a model.

    Attributes:
        inputs: full shapes as in the protocol; tensors that only the model can describe may be
            missing.
        outputs: as `inputs`.
        label_files: by output, path relative to the model's folder.
        document: the normalised configuration.
        notes: hints in the file that have no effect.
        steps: steps of an ensemble.
    """

    name: str
    platform: str
    backend: str
    max_batch_size: int
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    label_files: dict[str, str]
    instance_groups: tuple[InstanceGroup, ...]
    version_policy: VersionPolicy
    model_file: str
    parameters: dict[str, str]
    decoupled: bool
    rerun: bool
    document: ConfigDocument
    warmup: tuple[WarmupSample, ...] = ()
    notes: tuple[str, ...] = ()
    steps: tuple[EnsembleStep, ...] = ()

    def spec(self, version: str, labels: Mapping[str, tuple[str, ...]] | None = None) -> ModelSpec:
        """Return the spec to publish for a version. `labels`: class names by output."""
        labels = labels or {}
        outputs = tuple(
            TensorSpec(o.name, o.datatype, o.shape, o.optional, labels.get(o.name, ()))
            for o in self.outputs
        )
        return ModelSpec(
            name=self.name,
            version=version,
            platform=self.platform or self.backend,
            backend=self.backend,
            max_batch_size=self.max_batch_size,
            inputs=self.inputs,
            outputs=outputs,
            decoupled=self.decoupled,
            rerun=self.rerun,
            parameters=dict(self.parameters),
            config=self.document,
            steps=self.steps,
        )


def parse(
    text: str, model: str, backend: str = "", kinds: Mapping[str, BackendKind] = BUILT_IN
) -> ModelConfig:
    """Parse the text of a config.pbtxt, "" if the file is missing.

    Args:
        model: name of the model's folder.
        backend: backend suggested by the model's files, for a text without backend.
        kinds: available backends by name.

    Raises:
        ConfigError: a wrong field; the text names the field and the fault.
    """
    message = _parsed(text_format.Parse, text, f"model '{model}': config.pbtxt")
    return _validated(message, model, backend, True, kinds)


def parse_json(
    text: str, model: str, backend: str = "", kinds: Mapping[str, BackendKind] = BUILT_IN
) -> ModelConfig:
    """Parse the JSON form, as in a load request of the repository API. See `parse`."""
    message = _parsed(json_format.Parse, text, f"model '{model}': config")
    return _validated(message, model, backend, True, kinds)


def parse_dict(
    document: dict[str, Any],
    model: str,
    backend: str = "",
    partial: bool = True,
    kinds: Mapping[str, BackendKind] = BUILT_IN,
) -> ModelConfig:
    """Parse the decoded JSON form. See `parse`. `partial`: the model may supply missing values."""
    message = _parsed(json_format.ParseDict, document, f"model '{model}': config")
    return _validated(message, model, backend, partial, kinds)


def of_spec(spec: ModelSpec, kinds: Mapping[str, BackendKind] = BUILT_IN) -> ModelConfig:
    """Return the configuration of a spec, including the values that the model has supplied."""
    return parse_dict(spec.config.as_dict(), spec.name, spec.backend, kinds=kinds)


def _parsed(read: Callable[[Any, Any], Any], source: Any, where: str) -> Any:
    try:
        return read(source, pb.ModelConfig())
    # The text format raises a plain ValueError for an unknown enum number.
    except (text_format.ParseError, json_format.ParseError, ValueError) as ex:
        raise ConfigError(f"{where}: {near_names.completed(str(ex))}") from None


def _validated(
    message: Any, model: str, guess: str, partial: bool, kinds: Mapping[str, BackendKind]
) -> ModelConfig:
    refuse_unsupported(message, model)
    if message.name and message.name != model:
        raise ConfigError(f"model '{model}': name '{message.name}' must be the folder's name")
    if message.max_batch_size < 0:
        raise ConfigError(f"model '{model}': max_batch_size {message.max_batch_size} is negative")
    kind = kinds[_backend(message, model, guess, kinds)]
    backend = kind.name
    steps = ensemble_steps(message, model) if kind is ENSEMBLE else ()
    groups = instance_groups(message, model, kind) if not steps else ()
    parameters = _parameters(message, model, backend)
    batched = message.max_batch_size > 0
    partial = partial and kind.completes
    inputs = tensors(message.input, model, "input", batched, partial)
    outputs = tensors(message.output, model, "output", batched, partial)
    policy = version_policy(message, model)
    model_file = message.default_model_filename or kind.model_file
    parts = model_file.split("/") if backend in RUNTIMES else [model_file]  # as MLServer's uri
    if not steps and not all(map(is_plain_file_name, parts)):
        raise ConfigError(
            f"model '{model}': default_model_filename '{model_file}' is not a plain file name"
        )
    _check_hints(message, model, backend)
    platform = message.platform or kind.platform
    _normalise(message, model, platform, backend, policy, groups, model_file)
    config = ModelConfig(
        name=model,
        platform=platform,
        backend=backend,
        max_batch_size=message.max_batch_size,
        inputs=inputs,
        outputs=outputs,
        label_files=label_files(message, model),
        instance_groups=groups,
        version_policy=policy,
        model_file=model_file,
        parameters=parameters,
        decoupled=message.model_transaction_policy.decoupled,
        rerun=_flag(parameters, "rerun", model),
        document=document_of(message),
        warmup=warmup_samples(message, model, message.max_batch_size, partial),
        notes=_notes(message, backend),
        steps=steps,
    )
    if steps:
        ensemble_graph.check_graph(config.spec("1"))
    return config


def _check_hints(message: Any, model: str, backend: str) -> None:
    """Refuse senseless values, even in fields that would have no effect."""
    check_batching(message, model)
    check_sequences(message, model)
    check_batch_tensors(message, model)
    if message.response_cache.enable:
        for kind, applies in (
            ("a decoupled model", message.model_transaction_policy.decoupled),
            ("a model with sequence_batching", message.HasField("sequence_batching")),
        ):
            if applies:
                raise ConfigError(f"model '{model}': response_cache is not supported for {kind}")
    level = message.optimization.graph.level
    if backend == ONNXRUNTIME and level not in _GRAPH_LEVELS:
        raise ConfigError(f"model '{model}': optimization.graph.level {level} is not -1, 0, 1 or 2")


def _notes(message: Any, backend: str) -> tuple[str, ...]:
    notes = without_effect(message)
    if message.HasField("dynamic_batching") and message.model_transaction_policy.decoupled:
        notes.append("dynamic_batching: no effect (requests of a decoupled model run one by one)")
    if message.optimization.graph.level and backend != ONNXRUNTIME:
        notes.append(f"optimization.graph.level: no effect (backend {backend} has no levels)")
    return tuple(notes)


def _backend(message: Any, model: str, guess: str, kinds: Mapping[str, BackendKind]) -> str:
    if message.platform == ENSEMBLE.platform:
        return ENSEMBLE.name
    if message.HasField("ensemble_scheduling"):
        raise ConfigError(f"model '{model}': ensemble_scheduling needs platform 'ensemble'")
    kinds = {name: kind for name, kind in kinds.items() if kind is not ENSEMBLE}
    names = ", ".join(kinds)
    platforms = {platform: kind.name for kind in kinds.values() for platform in kind.platforms}
    if message.platform and message.platform not in platforms:
        raise ConfigError(f"model '{model}': platform '{message.platform}' is not supported")
    if message.backend and message.backend not in kinds:
        raise ConfigError(
            f"model '{model}': backend '{message.backend}' is not supported (supported: {names})"
        )
    of_platform = platforms.get(message.platform, "")
    if message.backend and of_platform and message.backend != of_platform:
        raise ConfigError(
            f"model '{model}': platform '{message.platform}' does not go with "
            f"backend '{message.backend}'"
        )
    backend: str = message.backend or of_platform or guess
    if not backend:
        raise ConfigError(f"model '{model}': backend is missing (supported: {names})")
    return backend


def _parameters(message: Any, model: str, backend: str) -> dict[str, str]:
    parameters = {name: value.string_value for name, value in sorted(message.parameters.items())}
    mode = parameters.get("client_shm_mode", "map")
    if mode not in ("map", "copy", "off"):
        raise ConfigError(
            f"model '{model}': parameters.client_shm_mode is '{mode}', not map, copy or off"
        )
    _flag(parameters, "writable_inputs", model)
    _check_max_memory(parameters, model, backend)
    return parameters


def _check_max_memory(parameters: dict[str, str], model: str, backend: str) -> None:
    bound = parameters.get(MAX_MEMORY)
    if bound is not None and not setting_kinds.size(bound):
        raise ConfigError(
            f"model '{model}': parameters.{MAX_MEMORY} is '{bound}', not {setting_kinds.SIZE}"
            " above 0"
        )
    if bound is not None and backend == ENSEMBLE.name:
        raise ConfigError(
            f"model '{model}': parameters.{MAX_MEMORY} '{bound}' is for the steps of an ensemble,"
            " which has no process of its own"
        )


def _flag(parameters: dict[str, str], name: str, model: str) -> bool:
    value = parameters.get(name, "false")
    if value not in ("true", "false"):
        raise ConfigError(f"model '{model}': parameters.{name} is '{value}', not true or false")
    return value == "true"


def _normalise(
    message: Any,
    model: str,
    platform: str,
    backend: str,
    policy: VersionPolicy,
    groups: tuple[InstanceGroup, ...],
    model_file: str,
) -> None:
    """Write the server's defaults into the message, for its JSON form."""
    message.name, message.platform = model, platform
    # Triton shows ensembles without backend
    message.backend = backend if backend != ENSEMBLE.name else ""
    message.default_model_filename = model_file
    if policy.kind == "latest":
        message.version_policy.latest.num_versions = policy.count
    message.model_transaction_policy.decoupled = message.model_transaction_policy.decoupled
    if not groups:
        del message.instance_group[:]
    elif not message.instance_group:
        message.instance_group.add()
    for group, entry in zip(groups, message.instance_group, strict=True):
        entry.name, entry.count = group.name, group.count
        entry.kind = pb.ModelInstanceGroup.Kind.Value(group.kind)
