"""Sequence tensors: inputs and outputs for `sequence_batching`, which clients do not see."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import replace

from shmserve.core.scheduling.sequence_names import SequenceId
from shmserve.errors import ConfigError, InvalidArgument
from shmserve.executor.tensors.memory_input import from_data, zeros
from shmserve.protocol.triton_config.backend_kinds import ONNXRUNTIME
from shmserve.tensor.config_document import (
    ControlEntry,
    ControlInputEntry,
    InitialStateEntry,
    InputEntry,
    OutputEntry,
    SequenceEntry,
    StateEntry,
)
from shmserve.tensor.dtypes import BY_CONFIG_NAME
from shmserve.tensor.spec import ModelSpec, TensorSpec

START = "CONTROL_SEQUENCE_START"
READY = "CONTROL_SEQUENCE_READY"
END = "CONTROL_SEQUENCE_END"
CORRID = "CONTROL_SEQUENCE_CORRID"

Array = np.ndarray[Any, Any]
_Named = tuple[str, str, tuple[int, ...]]  # name, data type and dims of a tensor
_FOLDER = "initial_state"


def with_sequence_tensors(spec: ModelSpec, entry: SequenceEntry) -> ModelSpec:
    """Return the spec as the backend sees it: control tensors and states come last."""
    known_inputs = {tensor.name for tensor in spec.inputs}
    known_outputs = {tensor.name for tensor in spec.outputs}
    controls: list[_Named] = [
        (each.name, _control_type(each.control[0]), (1,)) for each in entry.control_input
    ]
    inputs = controls + [(s.input_name, s.data_type, s.dims) for s in entry.state]
    outputs: list[_Named] = [(s.output_name, s.data_type, s.dims) for s in entry.state]
    inputs = [each for each in inputs if each[0] not in known_inputs]
    outputs = [each for each in outputs if each[0] not in known_outputs]
    config, batch = spec.config, (-1,) if spec.max_batch_size else ()
    # If the configuration of an ONNX model lists no tensors, all are taken from the graph
    if config.input or spec.backend != ONNXRUNTIME:
        added = tuple(InputEntry(name, kind, dims=dims) for name, kind, dims in inputs)
        config = replace(config, input=config.input + added)
    if config.output or spec.backend != ONNXRUNTIME:
        state_outputs = tuple(OutputEntry(name, kind, dims) for name, kind, dims in outputs)
        config = replace(config, output=config.output + state_outputs)
    return replace(
        spec,
        inputs=spec.inputs + tuple(_tensor(each, batch) for each in inputs),
        outputs=spec.outputs + tuple(_tensor(each, batch) for each in outputs),
        config=config,
    )


def without_sequence_tensors(loaded: ModelSpec, client_spec: ModelSpec) -> ModelSpec:
    """Return a loaded spec as clients see it: without control tensors and states. A control tensor
    or state that the configuration (`client_spec`) lists as input or output stays."""
    entry = loaded.config.sequence_batching
    assert isinstance(entry, SequenceEntry)
    inputs = {each.name for each in entry.control_input} | {s.input_name for s in entry.state}
    inputs -= {each.name for each in client_spec.config.input}
    outputs = {s.output_name for s in entry.state} - {
        each.name for each in client_spec.config.output
    }
    config = loaded.config
    return replace(
        loaded,
        inputs=tuple(tensor for tensor in loaded.inputs if tensor.name not in inputs),
        outputs=tuple(tensor for tensor in loaded.outputs if tensor.name not in outputs),
        config=replace(
            config,
            input=tuple(each for each in config.input if each.name not in inputs),
            output=tuple(each for each in config.output if each.name not in outputs),
        ),
    )


def _tensor(named: _Named, batch: tuple[int, ...]) -> TensorSpec:
    name, kind, dims = named
    return TensorSpec(name, BY_CONFIG_NAME[kind].name, (*batch, *dims))


def _control_type(control: ControlEntry) -> str:
    if control.kind == CORRID:
        return control.data_type
    if control.int32_false_true:
        return "TYPE_INT32"
    return "TYPE_FP32" if control.fp32_false_true else "TYPE_BOOL"


class Flags(Struct, frozen=True):
    """Values of the control tensors for one request."""

    start: bool
    end: bool
    ready: bool = True


class Controls:
    """Control tensors of one model. `batched`: True if the tensors have a batch dimension."""

    def __init__(self, entries: tuple[ControlInputEntry, ...], batched: bool) -> None:
        self._controls = [(entry.name, entry.control[0]) for entry in entries]
        self._shape = (1, 1) if batched else (1,)
        self.has_ready = any(control.kind == READY for _, control in self._controls)

    def check(self, sequence: SequenceId) -> None:
        """Check that the model's control tensors can hold a sequence id. Raise InvalidArgument if
        the id does not fit the control tensor's type."""
        for name, control in self._controls:
            if control.kind != CORRID or control.data_type == "TYPE_STRING":
                continue
            bounds = np.iinfo(BY_CONFIG_NAME[control.data_type].numpy)
            if isinstance(sequence, str) or not bounds.min <= sequence <= bounds.max:
                raise InvalidArgument(
                    f"sequence_id {sequence!r} does not fit {control.data_type} "
                    f"of the control input '{name}'"
                )

    def arrays(self, sequence: SequenceId, flags: Flags) -> dict[str, tuple[str, Array]]:
        """Return datatype and value of each control tensor, by name."""
        return {name: self._array(control, sequence, flags) for name, control in self._controls}

    def _array(
        self, control: ControlEntry, sequence: SequenceId, flags: Flags
    ) -> tuple[str, Array]:
        kind = BY_CONFIG_NAME[_control_type(control)]
        if control.kind == CORRID:
            value: Any = sequence if kind.itemsize else str(sequence).encode()
        else:
            pair: tuple[Any, ...] = (
                control.int32_false_true or control.fp32_false_true or control.bool_false_true
            )
            flag_of_kind = {START: flags.start, END: flags.end, READY: flags.ready}
            value = pair[flag_of_kind[control.kind]]
        return kind.name, np.full(self._shape, value, kind.numpy)


class States:
    """States that the sequences of one model have left for their next requests.

    Memory is bounded by the number of living sequences: each sequence has one array for every
    state.
    """

    def __init__(self, spec: ModelSpec, entries: tuple[StateEntry, ...], directory: str) -> None:
        """Read the initial states. `directory`: the model's folder. Raise ConfigError if the file
        of an initial state cannot be used."""
        batch = (1,) if spec.max_batch_size else ()
        self.outputs = {entry.output_name: entry for entry in entries}
        self._initial = {
            entry.input_name: (
                BY_CONFIG_NAME[entry.data_type].name,
                _initial(entry, batch, directory, spec.name),
            )
            for entry in entries
        }
        self._settled: dict[SequenceId, dict[str, Array]] = {}
        self._pending: dict[SequenceId, dict[str, Array]] = {}  # of requests that may still fail

    def arrays(self, sequence: SequenceId, start: bool) -> dict[str, tuple[str, Array]]:
        """Return datatype and value of each state, by input name, for the next request of a
        sequence."""
        settled = {} if start else self._settled.get(sequence, {})
        return {name: (kind, settled.get(name, at)) for name, (kind, at) in self._initial.items()}

    def keep(self, sequence: SequenceId, outputs: dict[str, Array]) -> None:
        """Record the states of an answer; `settle` makes them valid, with the states of earlier
        answers of the same run. `sequence`: id of the sequence. `outputs`: arrays by output name,
        in memory that nothing else uses."""
        self._pending.setdefault(sequence, {}).update(
            {
                entry.input_name: outputs[name]
                for name, entry in self.outputs.items()
                if name in outputs
            }
        )

    def settle(self, sequence: SequenceId, succeeded: bool) -> None:
        """End a request: keep its states if the request succeeded, else leave the old states."""
        pending = self._pending.pop(sequence, None)
        if succeeded and pending is not None:
            # states without a new value keep the old value
            self._settled.setdefault(sequence, {}).update(pending)

    def forget(self, sequence: SequenceId) -> None:
        """Drop the states of a sequence that has ended or begins anew."""
        self._settled.pop(sequence, None)
        self._pending.pop(sequence, None)


def _initial(entry: StateEntry, batch: tuple[int, ...], directory: str, model: str) -> Array:
    """Return the initial value of a state: the configured file, else zeros. Without
    `initial_state`, variable dimensions have size 1."""
    initial = entry.initial_state[0] if entry.initial_state else InitialStateEntry()
    dims = initial.dims if entry.initial_state else tuple(max(1, dim) for dim in entry.dims)
    datatype, shape = BY_CONFIG_NAME[entry.data_type].name, (*batch, *dims)
    name = initial.data_file
    if not isinstance(name, str):
        return zeros(datatype, shape)
    where = f"model '{model}': sequence_batching.state: data_file '{name}'"
    try:
        with open(os.path.join(directory, _FOLDER, name), "rb") as file:
            data = file.read()
    except OSError as ex:
        raise ConfigError(f"{where} cannot be read ({ex.strerror})") from None
    return from_data(data, name, datatype, shape, model, where)
