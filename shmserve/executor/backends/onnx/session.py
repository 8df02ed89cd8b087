"""ONNX Runtime sessions: options from a model's parameters, and the tensors of a graph."""

from __future__ import annotations

import logging
import os
import re
from typing import Any

from shmserve.core.control.memory_bounds import MAX_MEMORY
from shmserve.errors import ConfigError
from shmserve.executor.backends.graph_completion import GraphTensor
from shmserve.executor.backends.onnx import cuda_provider
from shmserve.protocol.triton_config import instance_groups
from shmserve.protocol.triton_config.backend_kinds import MODEL_FILE_IN_FOLDER
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
ELEMENTS = {number: text.partition("(")[2][:-1] for text, (_, number) in _TYPES.items()}

# Parameter -> option of the session
_THREADS = {
    "intra_op_thread_count": "intra_op_num_threads",
    "inter_op_thread_count": "inter_op_num_threads",
}

# Parameters for the server or other parts of the backend, not session options
_OTHER_PARAMETERS = {
    "rerun",
    "client_shm_mode",
    MAX_MEMORY,
    "memory.enable_memory_arena_shrinkage",
}

# Reason why a parameter of Triton's has no effect, logged when the model loads
_NO_EFFECT = {
    "writable_inputs": "ONNX models do not write into their inputs",
    "share_session_between_instances": "every instance is a process of its own",
}

_LEVELS = {
    "disable": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
# Values of optimization.graph.level, checked by the configuration's reader
_NUMBERED_LEVELS = {-1: "basic", 0: "all", 1: "extended", 2: "disable"}
_ZIPMAP = (  # sklearn's classifiers, as skl2onnx converts them by default
    " Export the model with options={'zipmap': False}: the output is then a tensor with a column"
    " for each class."
)
_ARENA = re.compile("cpu:0|gpu:(0|[1-9][0-9]*)")
_SWITCH = {"0": False, "1": True, "false": False, "true": True, "False": False, "True": True}


def options(ort: Any, spec: ModelSpec, on_gpu: bool = False) -> Any:
    """Return session options from config.pbtxt. `on_gpu`: True if parameters of the CUDA provider
    apply.

    By default, the cores of this process are divided among the instances of the model, which are
    processes side by side. Each instance has at least one thread. Threads do not spin while they
    wait, because other processes of the server use the same cores.
    """
    options = ort.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = default_threads(spec)
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    choices = _choices(ort)
    level = _NUMBERED_LEVELS[spec.config.graph_level]
    options.graph_optimization_level = choices["graph_optimization_level"][1][level]
    for name, text in spec.parameters.items():
        if name in _THREADS:
            setattr(options, _THREADS[name], thread_count(spec, name, text, 0))
        elif name in choices:
            attribute, values = choices[name]
            setattr(options, attribute, _choice(spec, name, text, values))
        elif name == "session.use_device_allocator_for_initializers":
            value = _choice(spec, name, text, _SWITCH)
            options.add_session_config_entry(name, str(int(value)))
        elif name not in _OTHER_PARAMETERS and not (on_gpu and name in cuda_provider.PARAMETERS):
            on_cpu = "the instance runs on the CPU" if name in cuda_provider.PARAMETERS else ""
            reason = on_cpu or _NO_EFFECT.get(name, "it is no option of backend onnxruntime")
            _log.info("configuration: parameters.%s: no effect (%s)", name, reason)
    return options


def run_options(ort: Any, spec: ModelSpec, ordinal: int | None = None) -> Any:
    """Return the options of every run: only `memory.enable_memory_arena_shrinkage`, e.g.
    "cpu:0;gpu:1". `ordinal`: the session's GPU, the only GPU whose entry counts; None: the
    session has no GPU."""
    options = ort.RunOptions()
    name = "memory.enable_memory_arena_shrinkage"
    value = spec.parameters.get(name, "")
    arenas = value.split(";") if value else []
    if not all(_ARENA.fullmatch(arena) for arena in arenas):
        raise ConfigError(
            f"model '{spec.name}': parameters.{name} '{value}' is no list of 'cpu:0' and 'gpu:K'"
        )
    arena_on = _SWITCH.get(spec.parameters.get("enable_mem_arena", "1"), True)
    if "cpu:0" in arenas and not arena_on:  # else every run would fail
        raise ConfigError(
            f"model '{spec.name}': parameters.{name} '{value}': the arena of cpu:0 is off"
            " (parameters.enable_mem_arena)"
        )
    own = [arena for arena in arenas if arena in ("cpu:0", f"gpu:{ordinal}")]
    if own:
        options.add_run_config_entry(name, ";".join(own))
    return options


def default_threads(spec: ModelSpec) -> int:
    """Return the number of threads for one instance of a model: a share of the cores."""
    instances = sum(group.size for group in instance_groups.read(spec.config)) or 1
    return max(1, all_cores() // instances)


def all_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _choices(ort: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return, for each parameter, the session's option and the values by text."""
    modes = {"0": ort.ExecutionMode.ORT_SEQUENTIAL, "1": ort.ExecutionMode.ORT_PARALLEL}
    levels = {text: getattr(ort.GraphOptimizationLevel, name) for text, name in _LEVELS.items()}
    return {
        "execution_mode": ("execution_mode", modes),
        "graph_optimization_level": ("graph_optimization_level", levels),
        "enable_mem_arena": ("enable_cpu_mem_arena", _SWITCH),
        "enable_mem_pattern": ("enable_mem_pattern", _SWITCH),
    }


def thread_count(spec: ModelSpec, name: str, text: str, least: int) -> int:
    """Return a parameter that is a number of threads. For ONNX Runtime, 0 means all cores."""
    if not (text.isascii() and text.isdigit() and least <= int(text) <= 1024):
        raise ConfigError(f"model '{spec.name}': parameters.{name} '{text}' is not {least} to 1024")
    return int(text)


def _choice(spec: ModelSpec, name: str, text: str, choices: dict[str, Any]) -> Any:
    if text not in choices:
        raise ConfigError(
            f"model '{spec.name}': parameters.{name} '{text}' is none of {', '.join(choices)}"
        )
    return choices[text]


def model_path(spec: ModelSpec, directory: str) -> str:
    """Return the path of a version's ONNX file. `directory`: the model's folder."""
    path = os.path.join(directory, spec.version, spec.config.model_file)
    return os.path.join(path, MODEL_FILE_IN_FOLDER) if os.path.isdir(path) else path


def graph_tensors(args: Any, model: str, kind: str) -> dict[str, GraphTensor]:
    """Return the graph's inputs or outputs by name. `kind`: "input" or "output". Raise ConfigError
    if the type is not a tensor of a known datatype."""
    tensors = {}
    for arg in args:
        if arg.type not in _TYPES:
            raise ConfigError(
                f"model '{model}': {kind} '{arg.name}' has the type {arg.type}, which is no tensor"
                f" of a known datatype.{_ZIPMAP if arg.type.startswith('seq(map(') else ''}"
            )
        datatype, element_type = _TYPES[arg.type]
        dims, has_dims = tuple(arg.shape or ()), arg.shape is not None
        tensors[arg.name] = GraphTensor(arg.name, datatype, element_type, dims, has_dims)
    return tensors
