"""ONNX Runtime sessions: options from a model's parameters, and what a graph says of itself."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

import msgspec
from msgspec import Struct

from shmserve.errors import ConfigError
from shmserve.executor.backends.onnx import cuda_provider as onnx_cuda
from shmserve.protocol.triton_config import instance_groups
from shmserve.tensor.spec import ModelSpec

_log = logging.getLogger(__name__)

# ONNX Runtime's name of a type -> (datatype, number of the element type in the ONNX schema)
_TYPES = {
    "tensor(float)": ("FP32", 1),
    "tensor(uint8)": ("UINT8", 2),
    "tensor(int8)": ("INT8", 3),
    "tensor(uint16)": ("UINT16", 4),
    "tensor(int16)": ("INT16", 5),
    "tensor(int32)": ("INT32", 6),
    "tensor(int64)": ("INT64", 7),
    "tensor(string)": ("BYTES", 8),
    "tensor(bool)": ("BOOL", 9),
    "tensor(float16)": ("FP16", 10),
    "tensor(double)": ("FP64", 11),
    "tensor(uint32)": ("UINT32", 12),
    "tensor(uint64)": ("UINT64", 13),
    "tensor(bfloat16)": ("BF16", 16),
}

# Parameter -> option of the session
_THREADS = {
    "intra_op_thread_count": "intra_op_num_threads",
    "inter_op_thread_count": "inter_op_num_threads",
}

# Parameters that this server or its backends know and that are no options of the session
_OTHER_PARAMETERS = {"rerun", "client_shm_mode", "memory.enable_memory_arena_shrinkage"}

# Told when the model loads: why a parameter of Triton's has no effect
_NO_EFFECT = {
    "writable_inputs": "ONNX models do not write into their inputs",
    "share_session_between_instances": "every instance is a process of its own",
}

_ARENA = re.compile("cpu:0|gpu:(0|[1-9][0-9]*)")
_SWITCH = {"0": False, "1": True, "false": False, "true": True, "False": False, "True": True}


class GraphTensor(Struct, frozen=True):
    """An input or output of a graph; `dims`: a number, a symbol's name, or None."""

    name: str
    datatype: str
    element_type: int
    dims: tuple[int | str | None, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in self.dims)


def runtime() -> Any:
    """The onnxruntime module.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import onnxruntime
    except ImportError:
        raise ConfigError(
            "backend 'onnxruntime' needs the extra 'onnx': pip install 'shmserve[onnx]'"
        ) from None
    return onnxruntime


def options(ort: Any, spec: ModelSpec, on_gpu: bool = False) -> Any:
    """Session options from config.pbtxt. `on_gpu`: those of the CUDA provider count, too.

    Threads by default: the cores of this process over the model's instances, which run side
    by side as processes, and at least one. They do not spin while they wait, because the
    cores belong to the other processes of the server as well.

    Raises:
        ConfigError: a value out of range.
    """
    config = msgspec.json.decode(spec.config_json)
    made = ort.SessionOptions()
    made.log_severity_level = 3
    made.intra_op_num_threads = default_threads(config)
    made.inter_op_num_threads = 1
    made.add_session_config_entry("session.intra_op.allow_spinning", "0")
    made.graph_optimization_level = _level(ort, config)
    choices = _choices(ort)
    for name, text in spec.parameters.items():
        if name in _THREADS:
            setattr(made, _THREADS[name], _threads(spec, name, text))
        elif name in choices:
            attribute, values = choices[name]
            setattr(made, attribute, _one_of(spec, name, text, values))
        elif name == "session.use_device_allocator_for_initializers":
            value = _one_of(spec, name, text, _SWITCH)
            made.add_session_config_entry(name, str(int(value)))
        elif name not in _OTHER_PARAMETERS and not (on_gpu and name in onnx_cuda.PARAMETERS):
            on_cpu = "the instance runs on the CPU" if name in onnx_cuda.PARAMETERS else ""
            why = on_cpu or _NO_EFFECT.get(name, "it is no option of backend onnxruntime")
            _log.info("configuration: parameters.%s: no effect (%s)", name, why)
    return made


def run_options(ort: Any, spec: ModelSpec, ordinal: int | None = None) -> Any:
    """Options of every run: only `memory.enable_memory_arena_shrinkage`, e.g. "cpu:0;gpu:1".
    Of GPUs only `ordinal` counts, that of the session; None: it has none."""
    made = ort.RunOptions()
    name = "memory.enable_memory_arena_shrinkage"
    value = spec.parameters.get(name, "")
    arenas = value.split(";") if value else []
    if not all(_ARENA.fullmatch(arena) for arena in arenas):
        raise ConfigError(
            f"model '{spec.name}': parameters.{name} '{value}' is no list of 'cpu:0' and 'gpu:K'"
        )
    own = [arena for arena in arenas if arena in ("cpu:0", f"gpu:{ordinal}")]
    if own:
        made.add_run_config_entry(name, ";".join(own))
    return made


def default_threads(config: dict[str, Any]) -> int:
    """Threads for one instance of a model: its share of the cores."""
    instances = sum(group.size for group in instance_groups.read(config)) or 1
    return max(1, len(os.sched_getaffinity(0)) // instances)


def _level(ort: Any, config: dict[str, Any]) -> Any:
    """optimization.graph.level; the configuration's reader has checked it."""
    levels = ort.GraphOptimizationLevel
    level = config.get("optimization", {}).get("graph", {}).get("level", 0)
    return {
        -1: levels.ORT_ENABLE_BASIC,
        0: levels.ORT_ENABLE_ALL,
        1: levels.ORT_ENABLE_EXTENDED,
        2: levels.ORT_DISABLE_ALL,
    }[level]


def _choices(ort: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """Parameter -> (option of the session, text -> value)."""
    levels = ort.GraphOptimizationLevel
    named_levels = {
        "disable": levels.ORT_DISABLE_ALL,
        "basic": levels.ORT_ENABLE_BASIC,
        "extended": levels.ORT_ENABLE_EXTENDED,
        "all": levels.ORT_ENABLE_ALL,
    }
    modes = {"0": ort.ExecutionMode.ORT_SEQUENTIAL, "1": ort.ExecutionMode.ORT_PARALLEL}
    return {
        "execution_mode": ("execution_mode", modes),
        "graph_optimization_level": ("graph_optimization_level", named_levels),
        "enable_mem_arena": ("enable_cpu_mem_arena", _SWITCH),
        "enable_mem_pattern": ("enable_mem_pattern", _SWITCH),
    }


def _threads(spec: ModelSpec, name: str, text: str) -> int:
    """A number of threads; 0 leaves it to ONNX Runtime (all cores)."""
    if not (text.isascii() and text.isdigit() and int(text) <= 1024):
        raise ConfigError(f"model '{spec.name}': parameters.{name} '{text}' is not 0 to 1024")
    return int(text)


def _one_of(spec: ModelSpec, name: str, text: str, choices: dict[str, Any]) -> Any:
    if text not in choices:
        raise ConfigError(
            f"model '{spec.name}': parameters.{name} '{text}' is none of {', '.join(choices)}"
        )
    return choices[text]


def graph_tensors(args: Any, model: str) -> dict[str, GraphTensor]:
    """The graph's inputs or outputs by name.

    Raises:
        ConfigError: one of them is not a tensor of a datatype we know.
    """
    found = {}
    for arg in args:
        if arg.type not in _TYPES:
            raise ConfigError(f"model '{model}': '{arg.name}' has the unknown type {arg.type}")
        datatype, element_type = _TYPES[arg.type]
        found[arg.name] = GraphTensor(arg.name, datatype, element_type, tuple(arg.shape))
    return found
