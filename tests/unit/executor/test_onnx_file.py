"""ONNX files read without ONNX Runtime: the same types and shapes, the same errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shmserve import repository
from shmserve.errors import ConfigError
from shmserve.executor.backends.onnx import graph_file
from shmserve.executor.backends.onnx.graph_file import FileTensor
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


def completed(directory: str) -> Any:
    (spec,) = repository.read_folder(directory).specs
    return graph_file.completed(spec, directory)


def test_the_output_of_sklearns_classifiers_is_explained(tmp_path: Path) -> None:
    directory = classifier(tmp_path / "m")
    for look in (load, completed):
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
        assert [list(t.shape) for t in told if t.has_shape] == [
            w.shape for w in wanted if w.type.startswith("tensor")
        ]
    assert [t.has_shape for t in graph.inputs] == [True, False, True]


@pytest.mark.parametrize("dims", [["N", 3, None], [2, 3], []])
def test_a_spec_is_completed_as_by_a_load(tmp_path: Path, dims: list[Any]) -> None:
    directory = adder(tmp_path / "m", dims, config="")
    assert completed(directory) == load(directory)[1]


def test_a_chosen_batch_is_told_with_what_changes_it(tmp_path: Path) -> None:
    chosen = completed(adder(tmp_path / "a", ["N", 3], config=""))
    assert chosen.max_batch_size == 4
    assert chosen.batch_note.startswith("max_batch_size 4 is the default for ONNX models whose")
    assert chosen.batch_note.endswith("; max_batch_size in config.pbtxt allows other batches")
    given = completed(adder(tmp_path / "b", ["N", 3], config="max_batch_size: 64"))
    assert (given.max_batch_size, given.batch_note) == (64, "")
    assert completed(adder(tmp_path / "c", [2, 3], config="")).batch_note == ""


def test_a_contradiction_is_found_without_a_session(tmp_path: Path) -> None:
    directory = adder(tmp_path / "m", [2, 3], config="max_batch_size: 8")
    with pytest.raises(ConfigError, match=r"max_batch_size is 8, but 'X' has shape \[2, 3\]"):
        completed(directory)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it is empty"),
        (b"\x08\x08", "it has no graph"),
        (b"not a model", "unknown wire type 6"),
        (b"\x3a\xff\xff\xff\xff\x7f", "a length of more than 32 bits"),
    ],
)
def test_a_file_that_is_no_model_is_told(tmp_path: Path, data: bytes, reason: str) -> None:
    directory = adder(tmp_path / "m", [1], config="")
    path = tmp_path / "m/1/model.onnx"
    path.write_bytes(data)
    with pytest.raises(ConfigError) as told:
        completed(directory)
    assert told.value.message == f"{path} is not an ONNX model ({reason})"


def test_types_within_types_have_a_limit(tmp_path: Path) -> None:
    def field(number: int, data: bytes) -> bytes:
        return bytes([number << 3 | 2, len(data)]) + data

    kind = b""
    for _ in range(20):
        kind = field(4, field(1, kind))
    path = tmp_path / "x.onnx"
    path.write_bytes(field(7, field(12, field(1, b"Y") + field(2, kind))))
    with pytest.raises(ConfigError, match="types in more than 16 others"):
        graph_file.read(str(path))


def test_what_only_shape_inference_tells_is_left_to_the_load(tmp_path: Path) -> None:
    directory = adder(tmp_path / "m", ["N"], config="")
    path = f"{directory}/1/model.onnx"
    model = onnx.load(path)
    model.graph.output[0].type.tensor_type.ClearField("shape")
    onnx.save(model, path)
    assert graph_file.read(path).outputs == (FileTensor("Y", "tensor(float)", (), False),)
    assert completed(directory).outputs == ()
