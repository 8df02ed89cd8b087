"""Programs of `torch.export` (`.pt2`): exported programs, and packages of AOTInductor.

An exported program is a graph, which torch runs operator by operator. The graph tells names, types
and shapes of arguments, so a configuration is optional. A package is native code for a kind of
device. A package tells only how many tensors go in and come out, and checks types and shapes
only if an environment variable is set.
"""

from __future__ import annotations

import logging
import os
import pickle
import warnings
import zipfile
from collections.abc import Callable
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from shmserve.core.device_names import device_name
from shmserve.errors import ConfigError, InvalidArgument
from shmserve.executor.backend import Context
from shmserve.executor.backends import graph_completion
from shmserve.executor.backends.graph_completion import Graph, GraphTensor
from shmserve.executor.backends.model_errors import from_cuda, sanitised
from shmserve.executor.backends.torch import archive_check
from shmserve.executor.backends.torch.arguments import Signature, places, require_tensors
from shmserve.tensor.config_document import InputEntry
from shmserve.tensor.spec import ModelSpec

_log = logging.getLogger(__name__)

_TYPES = {
    "float32": "FP32",
    "float64": "FP64",
    "float16": "FP16",
    "bfloat16": "BF16",
    "bool": "BOOL",
    **{
        f"{kind}{bits}": f"{kind}{bits}".upper()
        for kind in ("int", "uint")
        for bits in (8, 16, 32, 64)
    },
}
_CHECK = "AOTI_RUNTIME_CHECK_INPUTS"  # without the variable, native code trusts shapes blindly
_SAFE = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"  # without the variable, torch may unpickle any object
# Texts of torch for shapes outside of the program's limits
_WRONG_SHAPE = ("Expected input at", "Guard failed")
_UNREADABLE = (
    *(AssertionError, AttributeError, ImportError, LookupError, OSError, RuntimeError, ValueError),
    zipfile.BadZipFile,
)


class Program(Struct, eq=False):
    """A callable program. Calls take tensors in the order of the flattened arguments, and return
    the flattened results.

    Attributes:
        ordinal: GPU of the program; None: the CPU.
        inputs: arguments by name; empty for a package, where arguments have no names.
        outputs: results by name, likewise.
        writes: names of written arguments.
    """

    ordinal: int | None
    run: Callable[..., Any]
    _flatten: Callable[[Any], tuple[list[Any], Any]]
    _unflatten: Callable[[list[Any]], tuple[tuple[Any, ...], dict[str, Any]]]
    counts: tuple[int, int]
    inputs: dict[str, GraphTensor] = {}
    outputs: dict[str, GraphTensor] = {}
    writes: frozenset[str] = frozenset()

    def __call__(self, *tensors: Any) -> list[Any]:
        """Run the program. Raise InvalidArgument for shapes outside of the program's limits."""
        args, kwargs = self._unflatten(list(tensors))
        try:
            return self._flatten(self.run(*args, **kwargs))[0]
        except (RuntimeError, AssertionError) as ex:
            if not any(text in str(ex) for text in _WRONG_SHAPE):
                raise
            text = sanitised(str(ex).splitlines()[0])
            raise InvalidArgument(f"the model takes no such shape: {text}") from None

    def completed(self, spec: ModelSpec, directory: str) -> tuple[ModelSpec, Signature]:
        """Return the spec, completed from the program, and the places of tensors. Raise ConfigError
        if the configuration contradicts the program, or misses a tensor of a package."""
        entries = spec.config.input, spec.config.output
        named = [[entry.name for entry in part] for part in entries]
        if not self.inputs:
            require_tensors(spec)
        taken = self._placed("input", named[0], self.inputs, self.counts[0], spec.name)
        given = self._placed("output", named[1], self.outputs, self.counts[1], spec.name)
        if self.inputs:
            graphs = _renamed(self.inputs, taken), _renamed(self.outputs, given)
            spec = graph_completion.completed(_unbatched(spec, *graphs), directory, *graphs)
        elif len(taken) != self.counts[0]:
            raise ConfigError(
                f"model '{spec.name}': the configuration has {len(taken)} inputs, the package takes"
                f" {self.counts[0]}"
            )
        names = list(self.inputs)
        written = frozenset(
            name for name, at in taken.items() if names and names[at] in self.writes
        )
        return spec, Signature(taken, False, given, written)

    def _placed(
        self, kind: str, names: list[str], own: dict[str, GraphTensor], count: int, model: str
    ) -> dict[str, int]:
        if own and set(names) <= own.keys():
            order = list(own)
            return {name: order.index(name) for name in names or order}
        return places(kind, names, count, model)


def _unbatched(spec: ModelSpec, inputs: Graph, outputs: Graph) -> ModelSpec:
    """Return the spec with the whole shapes of inputs, for requests without batches, unless all
    tensors have the same number of rows, or the configuration chooses batches."""
    rows = {tensor.dims[:1] for graph in (inputs, outputs) for tensor in graph.values()}
    if spec.max_batch_size or len(rows) == 1:
        return spec
    entries = spec.config.input or tuple(map(InputEntry, inputs))
    entries = tuple(replace(e, dims=e.dims or inputs[e.name].shape) for e in entries)
    return replace(spec, config=replace(spec.config, input=entries))


def opened(torch: Any, path: str, ordinal: int | None, context: Context) -> Program:
    """Load the program of a file. `ordinal`: GPU of the instance; None: the CPU. Raise ConfigError
    if the file is unreadable, for another device, or forbidden native code."""
    spec = context.spec
    try:
        if reason := archive_check.code_in(torch, path):
            context.require_model_code(f"file '{spec.config.model_file}' {reason}")
        if reason == archive_check.NATIVE:
            os.environ.setdefault(_CHECK, "1")  # native code, too, sees torch's variables
            return _package(torch, path, ordinal, context)
        if not context.allow_model_code:
            os.environ[_SAFE] = "1"
        return _exported(torch, path, ordinal, context)
    except pickle.UnpicklingError:  # with `_SAFE`, for objects other than tensors
        context.require_model_code(f"file '{spec.config.model_file}' holds a pickle")
        raise
    except _UNREADABLE as ex:
        if from_cuda(ex, "model") is not None:
            raise
        _log.error("loading %s failed: %s", path, ex)
        raise ConfigError(
            f"model '{spec.name}': file '{spec.config.model_file}' is no exported program or"
            " package that this version of torch can read"
        ) from None


def _exported(torch: Any, path: str, ordinal: int | None, context: Context) -> Program:
    tree = torch.utils._pytree
    with warnings.catch_warnings(action="ignore"):
        program = torch.export.load(path)
        samples, _ = tree.tree_flatten_with_path(program.example_inputs)
        if not archive_check.has_plain_paths(tree.keystr(at) for at, _ in samples):
            file = context.spec.config.model_file
            context.require_model_code(f"file '{file}' has names that are not plain identifiers")
        if ordinal is not None:
            from torch.export.passes import move_to_device_pass

            program = move_to_device_pass(program, device_name(ordinal))
        values = {node.name: node.meta.get("val") for node in program.graph.nodes}
        signature, model = program.graph_signature, context.spec.name
        arguments = [spec.arg for spec in signature.input_specs if spec.kind.name == "USER_INPUT"]
        inputs = {
            argument.name: _tensor(values.get(argument.name), argument.name, "input", model)
            for argument in arguments
            if not hasattr(argument, "value")  # else fixed by the export: a number, a text
        }
        count = len(signature.user_outputs)
        names = _result_names(tree, program.call_spec.out_spec, count)
        outputs = {
            name: _tensor(values.get(node), name, "output", model)
            for name, node in zip(names, signature.user_outputs, strict=True)
        }
        run = program.module()

    def unflatten(tensors: list[Any]) -> Any:
        rest = iter(tensors)
        leaves = [a.value if hasattr(a, "value") else next(rest) for a in arguments]
        return tree.tree_unflatten(leaves, program.call_spec.in_spec)

    return Program(
        ordinal,
        run,
        tree.tree_flatten,
        unflatten,
        (len(inputs), count),
        inputs,
        outputs,
        frozenset(signature.user_inputs_to_mutate.values()) | _written(program.graph),
    )


def _written(graph: Any) -> frozenset[str]:
    """Return the arguments to which operators of the graph may write, also through a view."""
    written = set()
    for node in graph.nodes:
        schema = getattr(node.target, "_schema", None)
        sources = list(node.all_input_nodes) if schema is not None and schema.is_mutable else []
        while sources:
            source = sources.pop()
            if source.op == "placeholder":
                written.add(source.name)
            elif _may_be_view(source):
                sources += source.all_input_nodes
    return frozenset(written)


def _may_be_view(node: Any) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is None or any(result.alias_info is not None for result in schema.returns)


def _package(torch: Any, path: str, ordinal: int | None, context: Context) -> Program:
    from torch._inductor import aoti_load_package

    tree, spec = torch.utils._pytree, context.spec
    package = aoti_load_package(path, device_index=-1 if ordinal is None else ordinal)
    kind = package.get_metadata().get("AOTI_DEVICE_KEY", "cpu")
    if kind == "cpu" and context.auto:
        ordinal = None
    if (kind == "cpu") != (ordinal is None):
        raise ConfigError(
            f"model '{spec.name}': file '{spec.config.model_file}' is compiled for '{kind}', but"
            f" the instance is on '{context.device}'"
        )
    taken, given = (tree.treespec_loads(text) for text in package.loader.get_call_spec())
    return Program(
        ordinal,
        package,
        tree.tree_flatten,
        lambda tensors: tree.tree_unflatten(tensors, taken),
        (taken.num_leaves, given.num_leaves),
    )


def _tensor(value: Any, name: str, kind: str, model: str) -> GraphTensor:
    """Return a graph's description of a tensor. Raise ConfigError for other values, and for
    types unknown to the protocol."""
    dtype = str(getattr(value, "dtype", "")).removeprefix("torch.")
    if dtype not in _TYPES:
        what = f"is of type {dtype}" if dtype else "is no tensor"
        raise ConfigError(f"model '{model}': {kind} '{name}' of the exported program {what}")
    dims = tuple(dim if isinstance(dim, int) else str(dim) for dim in value.shape)
    return GraphTensor(name, _TYPES[dtype], 0, dims)


def _result_names(tree: Any, spec: Any, count: int) -> list[str]:
    """Return the keys of a dict of results, else OUTPUT__0, OUTPUT__1 and so on."""
    paths, _ = tree.tree_flatten_with_path(tree.tree_unflatten(list(range(count)), spec))
    keys = [getattr(path[0], "key", "") if len(path) == 1 else "" for path, _ in paths]
    if keys and all(isinstance(key, str) and key for key in keys):
        return keys
    return [f"OUTPUT__{place}" for place in range(count)]


def _renamed(own: dict[str, GraphTensor], taken: dict[str, int]) -> dict[str, GraphTensor]:
    """Return a graph's tensors by the configuration's names, as far as given."""
    names = {place: name for name, place in taken.items()}
    return {names.get(place, name): tensor for place, (name, tensor) in enumerate(own.items())}
