"""Independent parts of a configuration, checked one by one: tensors, labels, versions, and the
steps of an ensemble (`ensemble_scheduling`), with fields that an ensemble cannot have."""

from collections.abc import Iterable
from typing import Any, Literal

from msgspec import Struct

from shmserve import ids
from shmserve._generated import model_config_pb2 as pb
from shmserve.errors import ConfigError
from shmserve.tensor.dtypes import BY_CONFIG_NAME
from shmserve.tensor.spec import EnsembleStep, TensorSpec

# Fields for models with instances of their own.
_NOT_OF_ENSEMBLES = ("backend", "default_model_filename", "instance_group", "model_warmup")
_LATEST = -1
_MOST_IN_FLIGHT = 1024  # answers of a streaming step


class VersionPolicy(Struct, frozen=True):
    """Choice of the version folders to serve. LATEST uses `count`, SPECIFIC uses `versions`."""

    kind: Literal["latest", "all", "specific"] = "latest"
    count: int = 1
    versions: tuple[int, ...] = ()

    def select(self, present: Iterable[int]) -> tuple[int, ...]:
        """Return the versions to serve, ascending, including absent SPECIFIC versions."""
        ordered = sorted(present)
        if self.kind == "specific":
            return tuple(sorted(self.versions))
        return tuple(ordered if self.kind == "all" else ordered[-self.count :])


def tensors(
    entries: Any, model: str, kind: str, batched: bool, partial: bool
) -> tuple[TensorSpec, ...]:
    """Return the completely described tensors. `kind` is "input" or "output". `batched`: a batch
    dimension precedes `dims`. `partial`: the backend can supply a missing data_type or dims."""
    complete: dict[str, TensorSpec] = {}
    seen: set[str] = set()
    for entry in entries:
        where = f"model '{model}': {kind} '{entry.name}'"
        if not entry.name:
            raise ConfigError(f"model '{model}': an {kind} has no name")
        if entry.name in seen:
            raise ConfigError(f"{where} is given twice")
        seen.add(entry.name)
        name = data_type(entry.data_type, where, partial)
        if not entry.dims and not partial:
            raise ConfigError(f"{where}: dims is missing")
        for dim in entry.dims:
            if dim != -1 and dim < 1:
                raise ConfigError(f"{where}: dims has {dim}, which is neither -1 nor positive")
        _check_reshape(entry, where)
        if kind == "input":
            _check_format(entry, where)
        if not name or not entry.dims:
            continue
        shape = ((-1,) if batched else ()) + tuple(entry.dims)
        optional = kind == "input" and entry.optional
        complete[entry.name] = TensorSpec(entry.name, name, shape, optional)
    return tuple(complete.values())


def data_type(number: int, where: str, partial: bool = False) -> str:
    """Return the protocol's name of a data type, or "" if `partial` allows a missing type."""
    # an open enum: a number outside the schema has no name
    names = pb.DataType.DESCRIPTOR.values_by_number
    name = names[number].name if number in names else str(number)
    if name == "TYPE_INVALID" and partial:
        return ""
    if name not in BY_CONFIG_NAME:
        raise ConfigError(f"{where}: data_type is missing or invalid ({name})")
    return BY_CONFIG_NAME[name].name


def _check_format(entry: Any, where: str) -> None:
    """Check that a format, which names three dimensions for clients, has three dimensions."""
    if entry.format and len(entry.dims) != 3:
        name = pb.ModelInput.Format.Name(entry.format)
        raise ConfigError(f"{where}: format {name} needs 3 dims, got {len(entry.dims)}")


def _check_reshape(entry: Any, where: str) -> None:
    if not entry.HasField("reshape"):
        return
    shape = tuple(entry.reshape.shape)
    if not entry.dims:
        raise ConfigError(f"{where}: reshape needs dims")
    if any(dim != -1 and dim < 1 for dim in shape):
        raise ConfigError(f"{where}: reshape has a size that is neither -1 nor positive")
    if _runs(tuple(entry.dims)) != _runs(shape):
        raise ConfigError(
            f"{where}: reshape {list(shape)} has other elements than dims {list(entry.dims)}"
        )


def _runs(dims: tuple[int, ...]) -> list[int]:
    """Return the numbers of elements before, between and after the variable dimensions."""
    runs = [1]
    for dim in dims:
        if dim == -1:
            runs.append(1)
        else:
            runs[-1] *= dim
    return runs


def label_files(message: Any, model: str) -> dict[str, str]:
    files: dict[str, str] = {}
    for output in message.output:
        if not output.label_filename:
            continue
        if not all(is_plain_file_name(part) for part in output.label_filename.split("/")):
            raise ConfigError(
                f"model '{model}': output '{output.name}': label_filename "
                f"'{output.label_filename}' is not a file inside the model's folder"
            )
        files[output.name] = output.label_filename
    return files


def is_plain_file_name(name: str) -> bool:
    return name not in ("", ".", "..") and not any(c in "/\\" or ord(c) < 32 for c in name)


def version_policy(message: Any, model: str) -> VersionPolicy:
    policy = message.version_policy
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return VersionPolicy("all")
    if choice == "specific":
        versions = tuple(policy.specific.versions)
        if not versions or any(v < 1 for v in versions) or len(set(versions)) != len(versions):
            raise ConfigError(
                f"model '{model}': version_policy.specific.versions must be distinct "
                "positive numbers"
            )
        return VersionPolicy("specific", versions=versions)
    return VersionPolicy("latest", count=policy.latest.num_versions or 1)


def ensemble_steps(message: Any, model: str) -> tuple[EnsembleStep, ...]:
    """Return the steps of an ensemble's ModelConfig message, in order. Raise ConfigError for a
    wrong field; the text names the field."""
    what = f"ensemble '{model}'"
    for field in _NOT_OF_ENSEMBLES:
        if getattr(message, field):
            raise ConfigError(f"{field} should not be specified for {what}")
    for entry in (*message.input, *message.output):
        if entry.HasField("reshape"):
            raise ConfigError(f"reshape of '{entry.name}' should not be specified for {what}")
    if message.WhichOneof("scheduling_choice") not in (None, "ensemble_scheduling"):
        raise ConfigError(f"{message.WhichOneof('scheduling_choice')} does not go with {what}")
    in_flight = message.ensemble_scheduling.max_inflight_requests
    if in_flight > _MOST_IN_FLIGHT:
        raise ConfigError(
            f"max_inflight_requests {in_flight} of {what} is more than {_MOST_IN_FLIGHT}"
        )
    steps = message.ensemble_scheduling.step
    if not steps:
        raise ConfigError(f"must specify 'step' for {what}")
    return tuple(_step(step, f"step {number} of {what}") for number, step in enumerate(steps))


def _step(step: Any, where: str) -> EnsembleStep:
    for field in ("model_name", "input_map", "output_map"):
        if not getattr(step, field):
            raise ConfigError(f"must specify '{field}' in {where}")
    fault = ids.model_name_fault(step.model_name)
    if fault:
        raise ConfigError(f"model_name in {where} is not a valid model name, {fault}")
    if step.model_version != _LATEST and step.model_version < 1:
        raise ConfigError(
            f"model_version {step.model_version} in {where} is neither -1 (the latest) nor positive"
        )
    version = "" if step.model_version == _LATEST else str(step.model_version)
    inputs, outputs = dict(sorted(step.input_map.items())), dict(sorted(step.output_map.items()))
    if "" in (*inputs, *outputs, *inputs.values(), *outputs.values()):
        raise ConfigError(f"a name in input_map or output_map is empty in {where}")
    return EnsembleStep(step.model_name, version, inputs, outputs)
