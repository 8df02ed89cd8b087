"""TorchScript arguments: options, tensors as arguments of `forward`, and inputs to be copied."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from shmserve.core.control.memory_bounds import MAX_MEMORY
from shmserve.core.device_names import ordinal_of
from shmserve.errors import ConfigError
from shmserve.executor.backend import Context
from shmserve.executor.backends.onnx.session import default_threads, thread_count
from shmserve.executor.backends.thread_trial import ThreadTrial, candidates
from shmserve.protocol.triton_config import document
from shmserve.tensor.spec import ModelSpec

_log = logging.getLogger(__name__)

_INDEXED = re.compile(r".*__([0-9]{1,4})")
_TRUE, _FALSE = ("true", "1"), ("false", "0")

_OTHER_PARAMETERS = {"rerun", "client_shm_mode", MAX_MEMORY}
_NO_EFFECT = {
    "writable_inputs": "inputs that the model writes into are copies anyway",
    "ENABLE_WEIGHT_SHARING": "every instance is a process of its own",
}
# Parameters for models on a GPU
_DISABLE_CUDNN = "DISABLE_CUDNN"
_CLEAN_CACHE = "ENABLE_CACHE_CLEANING"


class Signature(Struct, frozen=True):
    """Mapping between the tensors of a configuration and arguments and results of `forward`.

    Attributes:
        positions: input -> position of the argument; None if inputs are passed by name.
        as_dict: True if all inputs are one argument, a dict.
        outputs: output -> position among the results.
        writes: inputs that the model may write into.
    """

    positions: dict[str, int] | None
    as_dict: bool
    outputs: dict[str, int]
    writes: frozenset[str]


def choose_device(torch: Any, context: Context) -> int | None:
    """Return the ordinal of the CUDA device on which a model runs; None: the CPU. Raise ConfigError
    if the model must run on a GPU, and torch cannot use a GPU here."""
    ordinal = ordinal_of(context.device)
    if ordinal is None or torch.cuda.is_available():
        return ordinal
    reason = "torch cannot use a GPU here: it is built for the CPU, or for another CUDA"
    if not context.auto:
        raise ConfigError(f"model '{context.spec.name}': {reason}")
    _log.info("runs on the CPU: %s", reason)
    return None


def cleans_cache(spec: ModelSpec) -> bool:
    """Return True if torch must free its cached GPU memory after every run."""
    return _flag(spec, _CLEAN_CACHE, spec.parameters.get(_CLEAN_CACHE, "false"))


def set_options(
    torch: Any, spec: ModelSpec, on_gpu: bool = False
) -> tuple[Callable[[], Any], ThreadTrial]:
    """Apply the parameters of config.pbtxt. Return a function that makes the context manager of a
    run, and the choice of threads. `on_gpu`: True if parameters for a GPU apply."""
    threads = default_threads(spec)
    counts = (threads,) if on_gpu else candidates(threads)
    inter_op = 1
    mode: Callable[[], Any] = torch.inference_mode
    for name, text in spec.parameters.items():
        if name == "INTRA_OP_THREAD_COUNT":
            counts = (thread_count(spec, name, text, 1),)
        elif name == "INTER_OP_THREAD_COUNT":
            inter_op = thread_count(spec, name, text, 1)
        elif name == "INFERENCE_MODE":
            mode = torch.inference_mode if _flag(spec, name, text) else torch.no_grad
        elif name == "DISABLE_OPTIMIZED_EXECUTION":
            torch._C._set_graph_executor_optimize(not _flag(spec, name, text))
        elif name == "ENABLE_JIT_EXECUTOR":
            torch._C._jit_set_profiling_executor(_flag(spec, name, text))
        elif name == "ENABLE_JIT_PROFILING":
            torch._C._jit_set_profiling_mode(_flag(spec, name, text))
        elif name == _DISABLE_CUDNN and on_gpu:
            torch.backends.cudnn.enabled = not _flag(spec, name, text)
        elif name == _CLEAN_CACHE and on_gpu:
            pass  # applied after each run
        elif name not in _OTHER_PARAMETERS:
            on_cpu = (
                "the instance runs on the CPU" if name in (_DISABLE_CUDNN, _CLEAN_CACHE) else ""
            )
            reason = on_cpu or _NO_EFFECT.get(name, "it is no option of backend pytorch")
            _log.info("configuration: parameters.%s: no effect (%s)", name, reason)
    torch.set_num_threads(counts[0])
    try:
        torch.set_num_interop_threads(inter_op)
    except RuntimeError:  # only possible once in a process
        _log.debug("INTER_OP_THREAD_COUNT has no effect: torch's threads have started already")
    return mode, ThreadTrial(counts)


def _flag(spec: ModelSpec, name: str, text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise ConfigError(f"model '{spec.name}': parameters.{name} '{text}' is not true or false")
    return text.lower() in _TRUE


def signature(model: Any, spec: ModelSpec) -> Signature:
    """Match the configuration with the model's `forward`. Raise ConfigError if the configuration
    does not fit `forward`."""
    schema = model._c._get_method("forward").schema
    arguments = schema.arguments[1:]  # without self
    names = [argument.name for argument in arguments]
    inputs = [tensor.name for tensor in spec.inputs]
    as_dict = len(arguments) == 1 and arguments[0].type.kind() == "DictType"
    positions: dict[str, int] | None = None
    if not as_dict and not set(inputs) <= set(names):
        positions = places("input", inputs, len(names), spec.name)
    if not as_dict:
        passed = {names[place] for place in positions.values()} if positions else set(inputs)
        for argument in arguments:
            if argument.name not in passed and not argument.has_default_value():
                raise ConfigError(
                    f"model '{spec.name}': the configuration has {len(inputs)} inputs, forward "
                    f"takes {len(names)}: argument '{argument.name}' has no input"
                )
    by_name = [returned.type.kind() for returned in schema.returns] == ["DictType"]
    results = [tensor.name for tensor in spec.outputs]
    outputs = {} if by_name else places("output", results, None, spec.name)
    return Signature(
        positions, as_dict, outputs, _written(model, inputs, names, positions, as_dict)
    )


def require_tensors(spec: ModelSpec) -> None:
    """Raise ConfigError unless the configuration describes every tensor, for a model file without
    descriptions."""
    if not spec.inputs or not spec.outputs:
        raise ConfigError(f"model '{spec.name}': config.pbtxt must tell input and output")
    document.require_complete(spec)


def places(kind: str, names: list[str], count: int | None, model: str) -> dict[str, int]:
    """Return the places of tensors among the `count` arguments or results of `forward`: the numbers
    at the ends of the names, else the order of the configuration. Raise ConfigError for a senseless
    place."""
    matches = [_INDEXED.fullmatch(name) for name in names]
    if all(matches):
        places = {name: int(m[1]) for name, m in zip(names, matches, strict=True) if m}
    elif any(matches):
        odd = next(name for name, m in zip(names, matches, strict=True) if not m)
        raise ConfigError(
            f"model '{model}': {kind} '{odd}' does not end with __ and its place, others do"
        )
    else:
        places = {name: place for place, name in enumerate(names)}
    if len(set(places.values())) != len(places):
        raise ConfigError(f"model '{model}': two {kind}s have the same place")
    wrong = next((name for name, at in places.items() if count is not None and at >= count), None)
    if wrong is not None:
        raise ConfigError(
            f"model '{model}': {kind} '{wrong}' has place {places[wrong]}, but forward takes "
            f"{count} arguments"
        )
    return places


def _written(
    model: Any, inputs: list[str], names: list[str], positions: dict[str, int] | None, as_dict: bool
) -> frozenset[str]:
    """Return the inputs that the model may write into, by TorchScript's own alias analysis."""
    graph = model.inlined_graph
    aliases = graph.alias_db()
    values = list(graph.inputs())[1:]
    if as_dict:
        return frozenset(inputs)
    written = {
        name for name, value in zip(names, values, strict=True) if aliases.has_writers(value)
    }
    if positions is None:
        return frozenset(written)
    return frozenset(name for name, place in positions.items() if names[place] in written)
