"""ONNX Runtime sessions: options from a model's parameters, and what a graph says of itself."""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from shmserve.errors import ConfigError
from shmserve.protocol import config_json
from shmserve.tensor.spec import ModelSpec, TensorSpec

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

# Parameters that are not options of the session
_OTHER_PARAMETERS = {"rerun", "client_shm_mode"}


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


def options(ort: Any, spec: ModelSpec) -> Any:
    """Session options from the parameters of config.pbtxt.

    One thread by default: instances are processes that run side by side, so the number
    of busy cores is the number of instances and nobody's spinning pool takes another's.
    A model that should answer one request faster sets intra_op_thread_count.

    Raises:
        ConfigError: an unknown parameter or a value out of range.
    """
    made = ort.SessionOptions()
    made.log_severity_level = 3
    made.intra_op_num_threads = 1
    made.inter_op_num_threads = 1
    choices = _choices(ort)
    for name, text in spec.parameters.items():
        if name in _THREADS:
            setattr(made, _THREADS[name], _threads(spec, name, text))
        elif name in choices:
            attribute, values = choices[name]
            setattr(made, attribute, _one_of(spec, name, text, values))
        elif name not in _OTHER_PARAMETERS:
            raise ConfigError(
                f"model '{spec.name}': parameters.{name} is not supported by backend 'onnxruntime'"
            )
    return made


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
    switch = {"0": False, "1": True}
    return {
        "execution_mode": ("execution_mode", modes),
        "graph_optimization_level": ("graph_optimization_level", named_levels),
        "enable_mem_arena": ("enable_cpu_mem_arena", switch),
        "enable_mem_pattern": ("enable_mem_pattern", switch),
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


def completed(
    spec: ModelSpec, inputs: dict[str, GraphTensor], outputs: dict[str, GraphTensor]
) -> ModelSpec:
    """The spec, agreeing with the graph: checked where the configuration told, else filled in.

    Raises:
        ConfigError: configuration and graph disagree.
    """
    if spec.decoupled:
        raise ConfigError(f"model '{spec.name}': backend 'onnxruntime' cannot be decoupled")
    sides = []
    for kind, told, graph in (("input", spec.inputs, inputs), ("output", spec.outputs, outputs)):
        for tensor in told or graph.values():
            _check(spec, kind, tensor, graph.get(tensor.name))
        filled = tuple(TensorSpec(t.name, t.datatype, t.shape) for t in graph.values())
        sides.append(told or filled)
    absent = [name for name in inputs if not any(t.name == name for t in sides[0])]
    if absent:
        raise ConfigError(f"model '{spec.name}': the configuration lacks input '{absent[0]}'")
    filled_in = _replaced(spec, sides[0], sides[1], spec.config_json)
    return _replaced(spec, sides[0], sides[1], config_json.completed(filled_in))


def _replaced(
    spec: ModelSpec,
    inputs: tuple[TensorSpec, ...],
    outputs: tuple[TensorSpec, ...],
    config: str,
) -> ModelSpec:
    return ModelSpec(
        name=spec.name,
        version=spec.version,
        platform=spec.platform,
        backend=spec.backend,
        max_batch_size=spec.max_batch_size,
        inputs=inputs,
        outputs=outputs,
        decoupled=spec.decoupled,
        rerun=spec.rerun,
        parameters=spec.parameters,
        config_json=config,
    )


def _check(
    spec: ModelSpec, kind: str, told: TensorSpec | GraphTensor, graph: GraphTensor | None
) -> None:
    where = f"model '{spec.name}': {kind} '{told.name}'"
    if graph is None:
        raise ConfigError(f"{where} is not in the ONNX model")
    if told.datatype != graph.datatype:
        raise ConfigError(f"{where} is {told.datatype}, but {graph.datatype} in the ONNX model")
    if isinstance(told, TensorSpec) and told.optional:
        raise ConfigError(f"{where}: optional is not supported by backend 'onnxruntime'")
    if spec.max_batch_size and (not graph.shape or graph.shape[0] != -1):
        raise ConfigError(
            f"{where} has shape {list(graph.shape)} in the ONNX model, which has no "
            "variable batch dimension for max_batch_size"
        )
    # what the graph fixes, the configuration must fix alike; the rest it may narrow
    fits = len(told.shape) == len(graph.shape) and all(
        dim in (-1, want) for want, dim in zip(told.shape, graph.shape, strict=True)
    )
    if not fits:
        raise ConfigError(
            f"{where} has shape {list(told.shape)}, but {list(graph.shape)} in the ONNX model"
        )
