"""Checks of `sequence_batching`: values against each other and against the rest of the file."""

from collections.abc import Iterable
from typing import Any

from shmserve._generated import model_config_pb2 as pb
from shmserve.core.scheduling.sequence_policy import DEFAULT_IDLE_US
from shmserve.errors import ConfigError
from shmserve.protocol.triton_config.config_parts import data_type, is_plain_file_name

CORRID = "CONTROL_SEQUENCE_CORRID"
_ID_TYPES = ("UINT64", "INT64", "UINT32", "INT32", "BYTES")
_PAIRS = ("int32_false_true", "fp32_false_true", "bool_false_true")
_MAX_CANDIDATES = 1 << 16


def check_sequences(message: Any, model: str) -> None:
    """Check a ModelConfig message, and fill in the default of the idle time. Raise ConfigError for
    a wrong value; the text names field and value."""
    if not message.HasField("sequence_batching"):
        return
    where = f"model '{model}': sequence_batching"
    sequences = message.sequence_batching
    if sequences.HasField("oldest"):
        _check_oldest(sequences.oldest, message.max_batch_size, f"{where}.oldest")
    share = sequences.direct.minimum_slot_utilization
    if not 0 <= share <= 1:
        raise ConfigError(f"{where}.direct.minimum_slot_utilization {share} is not between 0 and 1")
    kinds = [_control_kind(entry, where) for entry in sequences.control_input]
    _refuse_twice(kinds, f"{where}.control_input: kind")
    for state in sequences.state:
        _check_state(state, where)
    inputs = [*sequences.control_input, *sequences.state]
    _refuse_twice(
        [getattr(entry, "name", "") or getattr(entry, "input_name", "") for entry in inputs],
        f"{where}: input",
    )
    _refuse_twice([state.output_name for state in sequences.state], f"{where}: output")
    sequences.max_sequence_idle_microseconds = (
        sequences.max_sequence_idle_microseconds or DEFAULT_IDLE_US
    )


def _check_oldest(oldest: Any, max_batch_size: int, where: str) -> None:
    if not 0 <= oldest.max_candidate_sequences <= _MAX_CANDIDATES:
        raise ConfigError(
            f"{where}.max_candidate_sequences {oldest.max_candidate_sequences} is not between 0 "
            f"and {_MAX_CANDIDATES}"
        )
    for size in oldest.preferred_batch_size:
        # max_batch_size 0 may still be replaced by the model file's value
        if size < 1 or (max_batch_size and size > max_batch_size):
            raise ConfigError(
                f"{where}.preferred_batch_size {size} is not between 1 "
                f"and max_batch_size {max_batch_size}"
            )


def _control_kind(entry: Any, where: str) -> str:
    """Return the kind of a control input. Raise ConfigError if the input is incomplete."""
    where = f"{where}.control_input '{entry.name}'"
    if not entry.name:
        raise ConfigError(f"{where} has no name")
    if len(entry.control) != 1:
        raise ConfigError(f"{where} has {len(entry.control)} controls, not 1")
    control = entry.control[0]
    names = pb.ModelSequenceBatching.Control.Kind.DESCRIPTOR.values_by_number
    if control.kind not in names:
        raise ConfigError(f"{where}: kind {control.kind} is unknown")
    kind: str = names[control.kind].name
    pairs = [list(getattr(control, name)) for name in _PAIRS if getattr(control, name)]
    if kind == CORRID:
        datatype = data_type(control.data_type, where)
        if datatype not in _ID_TYPES or pairs:
            raise ConfigError(
                f"{where}: {CORRID} needs one of the data types TYPE_UINT64, TYPE_INT64, "
                "TYPE_UINT32, TYPE_INT32 and TYPE_STRING, and no false_true"
            )
    elif len(pairs) != 1 or len(pairs[0]) != 2:
        raise ConfigError(f"{where}: {kind} needs one of {', '.join(_PAIRS)} with two values")
    return kind


def _check_state(state: Any, where: str) -> None:
    where = f"{where}.state '{state.input_name}'"
    if not state.input_name or not state.output_name:
        raise ConfigError(f"{where}: input_name and output_name are needed")
    kind = data_type(state.data_type, where)
    if any(dim != -1 and dim < 1 for dim in state.dims):
        raise ConfigError(f"{where}: dims {list(state.dims)} has a size that is not -1 or positive")
    if len(state.initial_state) > 1:
        raise ConfigError(f"{where}: initial_state is given {len(state.initial_state)} times")
    for initial in state.initial_state:
        if data_type(initial.data_type, f"{where}: initial_state") != kind:
            raise ConfigError(f"{where}: initial_state has another data_type than the state")
        fits = len(initial.dims) == len(state.dims) and all(
            dim >= 1 and want in (-1, dim)
            for want, dim in zip(state.dims, initial.dims, strict=True)
        )
        if not fits:
            raise ConfigError(
                f"{where}: initial_state has dims {list(initial.dims)}, "
                f"which do not fit the state's {list(state.dims)}"
            )
        choice = initial.WhichOneof("state_data")
        file = initial.data_file
        if choice == "data_file" and not all(map(is_plain_file_name, file.split("/"))):
            raise ConfigError(
                f"{where}: data_file '{file}' is not a file inside the model's folder "
                "'initial_state'"
            )
        if choice is None or (choice == "zero_data" and not initial.zero_data):
            raise ConfigError(f"{where}: initial_state needs zero_data or data_file")


def _refuse_twice(names: Iterable[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise ConfigError(f"{what} '{name}' is given twice")
        seen.add(name)
