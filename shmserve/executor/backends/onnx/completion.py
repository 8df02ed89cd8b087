"""A configuration and the ONNX graph it is for: completed by the graph, or refused.

As Triton completes: nothing where the configuration tells inputs and outputs; else a graph
whose every tensor has a variable first dimension gets `max_batch_size: 4` and dynamic
batching unless the configuration says otherwise, and a scalar is `dims: [1]` reshaped to [].
"""

from __future__ import annotations

from typing import Any

import msgspec

from shmserve.errors import ConfigError
from shmserve.executor.backends.onnx.session import GraphTensor
from shmserve.executor.backends.reshape import model_side
from shmserve.protocol import config_json
from shmserve.protocol.triton_config import model_config
from shmserve.repository import read_labels
from shmserve.tensor.dtypes import BY_CONFIG_NAME, DATATYPES
from shmserve.tensor.spec import ModelSpec, TensorSpec

DEFAULT_MAX_BATCH_SIZE = 4

Graph = dict[str, GraphTensor]


def completed(spec: ModelSpec, directory: str, inputs: Graph, outputs: Graph) -> ModelSpec:
    """The spec, agreeing with the graph: checked where the configuration told, else filled in.

    `directory` is the model's folder, which has the labels of outputs.

    Raises:
        ConfigError: configuration and graph disagree.
    """
    if spec.decoupled:
        raise ConfigError(f"model '{spec.name}': backend 'onnxruntime' cannot be decoupled")
    config: dict[str, Any] = msgspec.json.decode(spec.config_json)
    if not config.get("input") or not config.get("output"):
        _choose_batch(config, spec, {"input": inputs, "output": outputs})
    for key, graph in (("input", inputs), ("output", outputs)):
        _fill(config, key, graph, spec.name)
    told = model_config.parse_json(spec.config_json, spec.name, spec.backend)
    labels = read_labels(told, directory)
    whole = msgspec.structs.replace(
        spec,
        max_batch_size=config["max_batch_size"],
        inputs=_specs(config, "input", labels),
        outputs=_specs(config, "output", labels),
        config_json=msgspec.json.encode(config).decode(),
    )
    whole = msgspec.structs.replace(whole, config_json=config_json.completed(whole))
    inner = model_side(whole)
    for kind, tensors, graph in (
        ("input", inner.inputs, inputs),
        ("output", inner.outputs, outputs),
    ):
        for tensor in tensors:
            _check(whole, kind, tensor, graph.get(tensor.name))
    absent = [name for name in inputs if whole.input(name) is None]
    if absent:
        raise ConfigError(
            f"model '{spec.name}': the configuration has {len(whole.inputs)} inputs, the ONNX "
            f"model {len(inputs)}: the configuration lacks input '{absent[0]}'"
        )
    return whole


def _choose_batch(config: dict[str, Any], spec: ModelSpec, graphs: dict[str, Graph]) -> None:
    tensors = [tensor for graph in graphs.values() for tensor in graph.values()]
    fixed = [tensor for tensor in tensors if not tensor.shape or tensor.shape[0] != -1]
    if fixed and config["max_batch_size"]:
        raise ConfigError(
            f"model '{spec.name}': max_batch_size is {config['max_batch_size']}, but "
            f"'{fixed[0].name}' has shape {list(fixed[0].shape)} in the ONNX model: "
            "no variable batch dimension"
        )
    told = [
        (entry, graph[entry["name"]])
        for key, graph in graphs.items()
        for entry in config.get(key, [])
        if entry["name"] in graph and entry.get("dims")
    ]
    # Dims that already have the graph's first dimension say that there is no other batch
    whole = any(
        len(entry["dims"]) == len(tensor.shape) and "reshape" not in entry for entry, tensor in told
    )
    if fixed or (whole and not config["max_batch_size"]):
        return
    config["max_batch_size"] = config["max_batch_size"] or DEFAULT_MAX_BATCH_SIZE
    if config["max_batch_size"] > 1:
        config.setdefault("dynamic_batching", {})


def _fill(config: dict[str, Any], key: str, graph: Graph, model: str) -> None:
    """Entries for a side that the configuration leaves out, and what single entries leave out."""
    entries: list[dict[str, Any]] = config.get(key) or [{"name": name} for name in graph]
    batched = config["max_batch_size"] > 0
    for entry in entries:
        tensor = graph.get(entry["name"])
        if tensor is None:
            raise ConfigError(f"model '{model}': {key} '{entry['name']}' is not in the ONNX model")
        if entry.get("data_type", "TYPE_INVALID") == "TYPE_INVALID":
            entry["data_type"] = DATATYPES[tensor.datatype].config_name
        if not entry.get("dims"):
            entry["dims"] = list(tensor.shape[1:] if batched else tensor.shape)
            entry["dims"] = entry["dims"] or [1]
            if not tensor.shape[batched:]:
                entry["reshape"] = {"shape": []}
        elif entry["dims"] == [1] and not tensor.shape:  # how a configuration tells a scalar
            entry["reshape"] = {"shape": []}
    config[key] = entries


def _specs(
    config: dict[str, Any], key: str, labels: dict[str, tuple[str, ...]]
) -> tuple[TensorSpec, ...]:
    batch = (-1,) if config["max_batch_size"] > 0 else ()
    return tuple(
        TensorSpec(
            entry["name"],
            BY_CONFIG_NAME[entry["data_type"]].name,
            (*batch, *entry["dims"]),
            entry.get("optional", False),
            labels.get(entry["name"], ()) if key == "output" else (),
        )
        for entry in config[key]
    )


def _check(spec: ModelSpec, kind: str, told: TensorSpec, graph: GraphTensor | None) -> None:
    where = f"model '{spec.name}': {kind} '{told.name}'"
    if graph is None:
        raise ConfigError(f"{where} is not in the ONNX model")
    if told.datatype != graph.datatype:
        raise ConfigError(f"{where} is {told.datatype}, but {graph.datatype} in the ONNX model")
    if told.optional:
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
