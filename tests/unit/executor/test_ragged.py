"""`batch_input` and `batch_output`: a ragged batch as the model sees it, and the distribution of
outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest

from shmserve.errors import ConfigError, Internal
from shmserve.executor.backend import BatchForm
from tests.backend_runner import FakeBackendRequest, arrays, load
from tests.model_files import Make, model_maker

helper, T = onnx.helper, onnx.TensorProto

KINDS = {
    "BATCH_ELEMENT_COUNT": [3, 2, 4],
    "BATCH_ACCUMULATED_ELEMENT_COUNT": [3, 5, 9],
    "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO": [0, 3, 5, 9],
    "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE": [0, 0, 0, 0],
    "BATCH_ITEM_SHAPE": [[3], [2], [2], [2]],
    "BATCH_ITEM_SHAPE_FLATTEN": [3, 2, 2, 2],
}
TENSORS = """
max_batch_size: 8 dynamic_batching { }
input [
  { name: "X" data_type: TYPE_FP32 dims: [ -1 ] allow_ragged_batch: true },
  { name: "W" data_type: TYPE_FP32 dims: [ 1 ] }
]
output [
  { name: "Y" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "TOLD" data_type: TYPE_FP32 dims: [ 1 ] }
]
batch_output [
  { target_name: "Y" kind: BATCH_SCATTER_WITH_INPUT_SHAPE source_input: "X" }
]
"""
TOLD = 'batch_input [ { kind: %s target_name: "T" data_type: TYPE_%s source_input: "X" } ]'
CONFIG = 'backend: "python"' + TENSORS + TOLD
MODEL = """
class Model:
    def infer(self, request):
        raise AssertionError("a batch of one is a batch")

    def infer_batch(self, batch):
        from tests.unit.executor import test_ragged
        given = {name: batch.input(name).copy() for name in ("X", "W", "T")}
        test_ragged.SEEN.append(given)
        result = given["X"] * 2 if test_ragged.SHORT is None else test_ragged.SHORT
        return {"Y": result, "TOLD": given["W"] + 1}
"""
SEEN: list[dict[str, np.ndarray]] = []  # inputs of each run of the model
SHORT: Any = None  # value that the model gives for Y instead


@pytest.fixture
def make(tmp_path, monkeypatch):
    SEEN.clear()
    monkeypatch.setattr(f"{__name__}.SHORT", None)
    return model_maker(tmp_path)


def requests() -> list[FakeBackendRequest]:
    shapes = [(1, 3), (1, 2), (2, 2)]
    start = 0
    found = []
    for shape in shapes:
        x = np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)
        w = np.full((shape[0], 1), start, np.float32)
        found.append(FakeBackendRequest(("Y", "TOLD"), {}, X=x, W=w))
        start += 10
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("datatype", ["INT32", "FP32"])
def test_a_ragged_batch_is_flat_and_its_outputs_are_each_requests_own(make, kind, datatype) -> None:
    backend, spec = load(make(MODEL, CONFIG % (kind, datatype)))
    assert [tensor.name for tensor in spec.inputs] == ["X", "W"]  # T is nobody's to send
    assert spec.inputs[0].shape == (-1, -1)
    assert spec.outputs[0].shape == (-1, -1)
    assert backend.batching is BatchForm.LISTED
    given = requests()
    responses = backend.execute(given)
    (seen,) = SEEN
    assert seen["X"].tolist() == [0, 1, 2, 10, 11, 20, 21, 22, 23]
    assert seen["W"].tolist() == [[0], [10], [20], [20]]
    assert seen["T"].tolist() == KINDS[kind]
    assert seen["T"].dtype == {"INT32": np.int32, "FP32": np.float32}[datatype]
    for request, response in zip(given, responses, strict=True):
        outputs = arrays(response)
        np.testing.assert_array_equal(outputs["Y"], request.inputs["X"].numpy() * 2)
        np.testing.assert_array_equal(outputs["TOLD"], request.inputs["W"].numpy() + 1)


def test_a_batch_has_every_output_that_one_of_its_requests_wants(make: Make) -> None:
    backend, _ = load(make(MODEL, CONFIG % ("BATCH_ELEMENT_COUNT", "INT32")))
    given = requests()
    given[0].requested, given[1].requested = ("Y",), ("TOLD",)
    assert [set(arrays(response)) for response in backend.execute(given)] == [{"Y", "TOLD"}] * 3


def test_an_output_of_another_size_is_everybodys_error(make: Make, monkeypatch) -> None:
    backend, _ = load(make(MODEL, CONFIG % ("BATCH_ELEMENT_COUNT", "INT32")))
    monkeypatch.setattr(f"{__name__}.SHORT", np.zeros(7, np.float32))
    with pytest.raises(Internal, match=r"output 'Y' has shape \[7\], but the batch has 9 elements"):
        backend.execute(requests())


def test_a_model_that_takes_requests_one_by_one_is_refused(make: Make) -> None:
    model = "class Model:\n    def infer(self, request):\n        return {}\n"
    with pytest.raises(ConfigError, match="batch_input and batch_output need a model that takes"):
        load(make(model, CONFIG % ("BATCH_ELEMENT_COUNT", "INT32")))


def test_onnx(tmp_path) -> None:
    """The graph has one dimension where the client has two."""
    values = {
        name: helper.make_tensor_value_info(name, kind, shape)  # type: ignore[arg-type]
        for name, kind, shape in (
            ("X", T.FLOAT, ["N"]),
            ("T", T.FLOAT, ["B"]),
            ("W", T.FLOAT, ["B", 1]),
            ("Y", T.FLOAT, ["N"]),
            ("TOLD", T.FLOAT, ["B", 1]),
        )
    }
    nodes = [
        helper.make_node("Add", ["X", "X"], ["Y"]),
        helper.make_node("Unsqueeze", ["T", "axis"], ["COLUMN"]),
        helper.make_node("Add", ["COLUMN", "W"], ["TOLD"]),
    ]
    axis = helper.make_tensor("axis", T.INT64, [1], [1])
    graph = helper.make_graph(
        nodes, "g", [values[name] for name in "XTW"], [values["Y"], values["TOLD"]], [axis]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    (tmp_path / "m" / "1").mkdir(parents=True)
    onnx.save(model, tmp_path / "m" / "1" / "model.onnx")
    told = TOLD % ("BATCH_ELEMENT_COUNT", "FP32")
    (tmp_path / "m" / "config.pbtxt").write_text('backend: "onnxruntime"' + TENSORS + told)
    backend, spec = load(str(tmp_path / "m"))
    assert [(tensor.name, tensor.shape) for tensor in spec.outputs] == [
        ("Y", (-1, -1)),
        ("TOLD", (-1, 1)),
    ]
    given = requests()[:2]
    first, second = map(arrays, backend.execute(given))
    assert first["Y"].tolist() == [[0, 2, 4]]
    assert second["Y"].tolist() == [[20, 22]]
    assert (first["TOLD"].tolist(), second["TOLD"].tolist()) == ([[3]], [[12]])
