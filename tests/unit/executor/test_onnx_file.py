"""ONNX files read without ONNX Runtime: the same types and shapes, the same errors."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmserve import repository
from shmserve.errors import ConfigError, ModelFailure
from shmserve.executor.backends.onnx import graph_file
from shmserve.protocol.protobuf import wire
from tests.backend_runner import load
from tests.unit.executor.test_onnx_backend import adder, save, value

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
helper, T = onnx.helper, onnx.TensorProto
ZIPMAP = (
    r"output 'output_probability' has the type seq\(map\(int64,tensor\(float\)\)\), which is no "
    r"tensor of a known datatype\. Export the model with options=\{'zipmap': False\}: the output"
)


def classifier(folder: Path) -> str:
    """Write a model as skl2onnx converts sklearn's classifiers by default."""
    node = helper.make_node(
        "ZipMap", ["X"], ["output_probability"], domain="ai.onnx.ml", classlabels_int64s=[0, 1]
    )
    probabilities = helper.make_map_type_proto(T.INT64, helper.make_tensor_type_proto(T.FLOAT, []))
    output = helper.make_value_info(
        "output_probability", helper.make_sequence_type_proto(probabilities)
    )
    return save(folder, [node], [value("X", T.FLOAT, [None, 2])], [output], config="")


def check(directory: str) -> str:
    (spec,) = repository.read_folder(directory).specs
    return graph_file.check(spec, directory)


def identity(folder: Path, given: list[Any], told: list[Any], config: str) -> str:
    """Write a model that gives X as Y. `told`: shape of Y as the file tells it."""
    node = helper.make_node("Identity", ["X"], ["Y"])
    return save(
        folder, [node], [value("X", T.FLOAT, given)], [value("Y", T.FLOAT, told)], config=config
    )


def test_the_output_of_sklearns_classifiers_is_explained(tmp_path: Path) -> None:
    directory = classifier(tmp_path / "m")
    for look in (load, check):
        with pytest.raises(ConfigError, match=ZIPMAP):
            look(directory)


def test_a_file_tells_all_that_a_session_tells(tmp_path: Path) -> None:
    weights = helper.make_tensor("W", T.DOUBLE, [2], [1.0, 2.0])
    sequence = helper.make_tensor_sequence_value_info("S", T.FLOAT, ["N"])
    nodes = [
        helper.make_node("Mul", ["X", "W"], ["Y"]),
        helper.make_node("SequenceAt", ["S", "I"], ["Z"]),
    ]
    inputs = [value("X", T.DOUBLE, ["N", 3, 2]), value("W", T.DOUBLE, [2]), sequence]
    inputs.append(value("I", T.INT64, []))
    outputs = [value("Y", T.DOUBLE, ["N", 3, 2]), value("Z", T.FLOAT, ["N"])]
    directory = save(tmp_path / "m", nodes, inputs, outputs, constants=[weights], config="")
    path = f"{directory}/1/model.onnx"
    graph, session = graph_file.read(path), ort.InferenceSession(path)
    for told, wanted in (
        (graph.inputs, session.get_inputs()),
        (graph.outputs, session.get_outputs()),
    ):
        assert [(t.name, t.type) for t in told] == [(w.name, w.type) for w in wanted]
    assert [t.shape for t in graph.inputs] == [("N", 3, 2), None, ()]
    assert [t.shape for t in graph.outputs] == [None, None]


def test_a_batch_that_a_load_may_choose_is_told_with_what_changes_it(tmp_path: Path) -> None:
    note = check(adder(tmp_path / "a", ["N", 3], config=""))
    assert note.startswith("max_batch_size is not set: a load chooses 4 if the first dimensions of")
    assert note.endswith("; max_batch_size in config.pbtxt allows other batches")
    assert check(adder(tmp_path / "b", ["N", 3], config="max_batch_size: 64")) == ""
    assert check(adder(tmp_path / "c", [2, 3], config="")) == ""


X = 'input { name: "X" data_type: TYPE_FP32 dims: %s }'
IO = f'{X} output {{ name: "Y" data_type: TYPE_FP32 dims: %s }}'


@pytest.mark.parametrize(
    ("given", "told", "config"),
    [
        (["N", 4], ["N", 3], f"max_batch_size: 8 {IO % (4, 4)}"),
        ([None, 4], [1, 3], f"max_batch_size: 8 {IO % (4, 4)}"),
        (["N", 4], [1, 3], "max_batch_size: 8"),
        (["N", 4], [1, 3], X % 4),
        ([2, 4], ["a", "b"], IO % ("[ 2, 4 ]", "[ 2, 4 ]")),
    ],
)
def test_shapes_of_outputs_are_left_to_the_load(
    tmp_path: Path, given: list[Any], told: list[Any], config: str
) -> None:
    directory = identity(tmp_path / "m", given, told, config)
    load(directory)  # ONNX Runtime infers the shape, and drops one that contradicts
    check(directory)


def test_shapes_that_only_fit_without_the_chosen_batch_are_left_to_the_load(tmp_path: Path) -> None:
    """The output has a fixed first dimension, as inference tells: the load chooses no batch."""
    reduce = helper.make_node("ReduceSum", ["X"], ["Y"], keepdims=1)
    config = 'input { name: "X" data_type: TYPE_FP32 dims: [ -1, 1 ] reshape { shape: [ -1, 1 ] } }'
    inputs, outputs = [value("X", T.FLOAT, ["N", 1])], [value("Y", T.FLOAT, ["M", 1])]
    directory = save(tmp_path / "m", [reduce], inputs, outputs, config=config)
    assert load(directory)[1].max_batch_size == 0
    check(directory)


def test_a_contradiction_is_found_without_a_session(tmp_path: Path) -> None:
    directory = adder(tmp_path / "m", [2, 3], config="max_batch_size: 8")
    with pytest.raises(ConfigError, match=r"max_batch_size is 8, but 'X' has shape \[2, 3\]"):
        check(directory)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it is empty"),
        (b"\x08\x08", "it has no graph"),
        (b"not a model", "unknown wire type 6"),
        (b"\x3a\xff\xff\xff\x7f", "field 7 is truncated"),
    ],
)
def test_a_file_that_is_no_model_is_told(tmp_path: Path, data: bytes, reason: str) -> None:
    directory = adder(tmp_path / "m", [1], config="")
    path = tmp_path / "m/1/model.onnx"
    path.write_bytes(data)
    with pytest.raises(ModelFailure):
        load(directory)
    with pytest.raises(ConfigError) as told:
        check(directory)
    assert told.value.message == f"{path} is not an ONNX model ({reason})"


def field(number: int, data: bytes) -> bytes:
    return wire.encode_field(number << 3 | wire.LEN, data)


def rewrite(directory: str, change: Callable[[Any], bytes | None]) -> None:
    """Change a model's file: with `change` of the model, or to the bytes that `change` returns."""
    path = Path(directory, "1/model.onnx")
    model = onnx.load(path)
    path.write_bytes(change(model) or model.SerializeToString())


def in_two_parts(model: Any) -> bytes:
    second = onnx.ModelProto()
    second.graph.doc_string = "more"
    second.graph.output.append(model.graph.output.pop())
    return bytes(model.SerializeToString() + second.SerializeToString())


def latin_initializer(model: Any) -> bytes:
    model.graph.initializer.append(helper.make_tensor("W@@", T.FLOAT, [1], [1.0]))
    return bytes(model.SerializeToString().replace(b"W@@", b"W\xe8\xe9"))


def latin_dimension(model: Any) -> bytes:
    return bytes(model.SerializeToString().replace(b"@", b"\xe8"))


def inferred_type(model: Any) -> None:
    model.graph.output[0].ClearField("type")


def inferred_shape(model: Any) -> None:
    model.graph.output[0].type.tensor_type.ClearField("shape")


def deep_groups(model: Any) -> bytes:
    return bytes(model.SerializeToString() + b"\x93\x03" * 70 + b"\x94\x03" * 70)


def long_tag(model: Any) -> bytes:
    return bytes(model.SerializeToString() + b"\x9a\x83\x80\x80\x10\x01a")


def type_in_two_parts(model: Any) -> bytes:
    """Give the type of X twice: the dimensions of both are dimensions of X."""
    half = helper.make_tensor_type_proto(T.FLOAT, [3]).SerializeToString()
    model.graph.input[0].type.tensor_type.shape.dim.pop()
    x = model.graph.input.pop().SerializeToString()
    return bytes(model.SerializeToString() + field(7, field(11, x + field(2, half))))


@pytest.mark.parametrize(
    "change",
    [
        in_two_parts, latin_initializer, inferred_type, inferred_shape, type_in_two_parts,
        deep_groups, long_tag,
    ],
)  # fmt: skip
def test_a_file_that_loads_is_never_refused(tmp_path: Path, change: Any) -> None:
    directory = identity(tmp_path / "m", ["N", 3], ["N", 3], IO % ("[ -1, 3 ]", "[ -1, 3 ]"))
    rewrite(directory, change)
    load(directory)
    assert check(directory) == ""


def test_dimensions_may_have_names_that_are_no_text(tmp_path: Path) -> None:
    directory = identity(tmp_path / "m", ["@", 3], ["@", 3], "max_batch_size: 8")
    rewrite(directory, latin_dimension)
    assert check(directory) == ""


def test_graphs_in_parts_have_the_tensors_of_all(tmp_path: Path) -> None:
    directory = identity(tmp_path / "m", ["N", 3], ["N", 3], "")
    rewrite(directory, in_two_parts)
    graph = graph_file.read(f"{directory}/1/model.onnx")
    assert [tensor.name for tensor in (*graph.inputs, *graph.outputs)] == ["X", "Y"]


def test_what_exceeds_the_readers_bounds_is_left_to_the_load(tmp_path: Path) -> None:
    kind = b""
    for _ in range(20):
        kind = field(4, field(1, kind))
    directory = adder(tmp_path / "m", [1], config="")
    fields = b"\x0a\x00" * 1_000_001
    for graph in (field(12, field(1, b"Y") + field(2, kind)), fields):
        rewrite(directory, lambda model, graph=graph: field(7, graph))  # type: ignore[misc]
        assert check(directory) == ""


def test_a_file_that_becomes_shorter_ends_no_process(tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "model.onnx"
    path.write_bytes(field(7, field(5, field(9, bytes(1000))) * 1000))
    whole = graph_file._FileBytes.__len__

    def shortened(data: Any) -> int:
        os.truncate(path, 100)
        return whole(data)

    monkeypatch.setattr(graph_file._FileBytes, "__len__", shortened)
    with pytest.raises(ConfigError, match=r"is not an ONNX model \(it is truncated\)"):
        graph_file.read(str(path))
