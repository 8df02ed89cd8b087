"""The onnxruntime backend: completion, checks, binding without copies."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from shmserve.errors import ArenaExhausted, Code, ConfigError, InvalidArgument, ShmserveError
from shmserve.tensor.spec import TensorSpec
from tests.backend_runner import FakeBackendRequest, arrays, ask, load

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
helper, T = onnx.helper, onnx.TensorProto

Dims = list[Any]


def value(name: str, kind: int, dims: Dims) -> Any:
    return helper.make_tensor_value_info(name, kind, dims)


def save(folder: Path, nodes: list[Any], inputs: list[Any], outputs: list[Any], **more: Any) -> str:
    (folder / "1").mkdir(parents=True)
    graph = helper.make_graph(nodes, "g", inputs, outputs, more.get("constants", []))
    opsets = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    onnx.save(model, folder / "1" / "model.onnx")
    config = more.get("config")
    if config is None:
        config = told("input", inputs) + told("output", outputs)
    if config:
        (folder / "config.pbtxt").write_text(config)
    return str(folder)


def told(key: str, values: list[Any]) -> str:
    """Return the part of a model configuration that describes these tensors."""
    text = ""
    for one in values:
        tensor = one.type.tensor_type
        kind = T.DataType.Name(tensor.elem_type)
        names = {"FLOAT": "FP32", "DOUBLE": "FP64", "FLOAT16": "FP16", "BFLOAT16": "BF16"}
        dims = [dim.dim_value or -1 for dim in tensor.shape.dim] or [1]
        text += f'{key} [ {{ name: "{one.name}" data_type: TYPE_{names.get(kind, kind)} '
        text += f"dims: {dims} }} ]\n"
    return text


def adder(folder: Path, dims: Dims, kind: int = T.FLOAT, config: str | None = None) -> str:
    """Y = X + X; the output has the input's dimensions."""
    node = helper.make_node("Add", ["X", "X"], ["Y"])
    ends = [value("X", kind, dims)], [value("Y", kind, dims)]
    return save(folder, [node], *ends, config=config)


def parameters(**told: str) -> str:
    """Return the part of a model configuration with these parameters."""
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: "{text}" }} }}'
        for key, text in told.items()
    )


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "m"


# ----------------------------------------------------------------- completion


def test_a_bare_model_is_completed(folder: Path) -> None:
    backend, spec = load(adder(folder, ["N", 3, None], config=""))
    assert spec.max_batch_size == 4
    assert spec.inputs == (TensorSpec("X", "FP32", (-1, 3, -1)),)
    assert spec.outputs == (TensorSpec("Y", "FP32", (-1, 3, -1)),)
    assert (spec.platform, spec.backend) == ("onnxruntime_onnx", "onnxruntime")
    config = json.loads(spec.config.json())
    assert config["max_batch_size"] == 4
    assert config["dynamic_batching"] == {}
    assert config["input"][0]["name"] == "X"
    assert config["output"][0] == {
        "name": "Y",
        "data_type": "TYPE_FP32",
        "dims": [3, -1],
        "label_filename": "",
        "is_shape_tensor": False,
        "is_non_linear_format_io": False,
    }
    backend.close()
    backend.close()


def test_completion_with_a_batch(folder: Path) -> None:
    config = 'backend: "onnxruntime" max_batch_size: 8'
    _, spec = load(adder(folder, ["N", 3], config=config))
    assert spec.inputs[0].shape == (-1, 3)
    assert json.loads(spec.config.json())["input"][0]["dims"] == [3]


def test_a_half_told_configuration_is_completed(folder: Path) -> None:
    config = 'input [ { name: "X" data_type: TYPE_FP32 dims: [ 2, 3 ] } ]'
    _, spec = load(adder(folder, ["N", 3], config=config))
    assert spec.inputs[0].shape == (2, 3)  # narrower than the graph
    assert spec.outputs[0].shape == (-1, 3)


def test_labels_survive_completion() -> None:
    _, spec = load("workers/digits")
    assert spec.outputs[1].labels[3] == "3"
    assert json.loads(spec.config.json())["output"][1]["label_filename"] == "labels.txt"


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ('input [ { name: "Q" data_type: TYPE_FP32 dims: [ 2, 3 ] } ]', "input 'Q' is not in"),
        ('output [ { name: "Q" data_type: TYPE_FP32 dims: [ 2, 3 ] } ]', "output 'Q' is not in"),
        ('input [ { name: "X" data_type: TYPE_FP64 dims: [ 2, 3 ] } ]', "is FP64, but FP32"),
        ('input [ { name: "X" data_type: TYPE_FP32 dims: [ 2 ] } ]', r"\[-1, 2\], but \[-1, 3\]"),
        ('input [ { name: "X" data_type: TYPE_FP32 dims: [ 2, 4 ] } ]', r"\[2, 4\], but"),
        ('input [ { name: "X" data_type: TYPE_FP32 dims: [ 2, -1 ] } ]', r"\[2, -1\], but"),
        ('input [ { name: "X" data_type: TYPE_FP32 dims: [ 2, 3 ] optional: true } ]', "optional"),
        ("model_transaction_policy { decoupled: true }", "cannot be decoupled"),
        ('parameters { key: "intra_op_thread_count" value { string_value: "x" } }', "0 to 1024"),
        ('parameters { key: "execution_mode" value { string_value: "2" } }', "none of 0, 1"),
    ],
)
def test_disagreement_is_refused(folder: Path, config: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load(adder(folder, ["N", 3], config=config))


def test_a_bare_model_without_a_variable_batch(folder: Path) -> None:
    _, spec = load(adder(folder, [2, "N"], config=""))
    assert (spec.max_batch_size, spec.inputs[0].shape) == (0, (2, -1))
    assert "dynamic_batching" not in json.loads(spec.config.json())


def test_a_model_in_a_folder_with_its_data(folder: Path) -> None:
    directory = Path(adder(folder, [2]))
    (directory / "1" / "model.onnx").rename(directory / "1" / "moved")
    (directory / "1" / "model.onnx").mkdir()
    (directory / "1" / "moved").rename(directory / "1" / "model.onnx" / "model.onnx")
    backend, spec = load(str(directory))
    assert arrays(ask(backend, spec, X=np.ones(2, np.float32)))["Y"].tolist() == [2, 2]


def test_reshape_and_warm_up(folder: Path) -> None:
    config = """
    max_batch_size: 2
    input [ { name: "X" data_type: TYPE_FP32 dims: [ 6 ] reshape { shape: [ 2, 3 ] } } ]
    output [ { name: "Y" data_type: TYPE_FP32 dims: [ 6 ] reshape { shape: [ 2, 3 ] } } ]
    model_warmup [ { name: "w" batch_size: 2 inputs { key: "X" value {
        data_type: TYPE_FP32 dims: [ 6 ] random_data: true } } } ]
    """
    backend, _spec = load(adder(folder, ["N", 2, 3], config=config))
    request = FakeBackendRequest(("Y",), X=np.ones((2, 6), np.float32))
    got = arrays(backend.execute([request])[0])["Y"]
    assert got.tolist() == [[2] * 6] * 2
    assert np.shares_memory(got, request.offered["Y"])  # no copy for the other shape
    with pytest.raises(ConfigError, match=r"\[-1, 3, 2\], but \[-1, 2, 3\]"):
        load(adder(folder.parent / "n", ["N", 2, 3], config=config.replace("2, 3", "3, 2")))


def test_a_bare_vector_is_a_batch_of_scalars(folder: Path) -> None:
    backend, spec = load(adder(folder, ["N"], config=""))
    assert (spec.max_batch_size, spec.inputs[0].shape) == (4, (-1, 1))
    entry = json.loads(spec.config.json())["input"][0]
    assert (entry["dims"], entry["reshape"]) == ([1], {"shape": []})
    got = arrays(ask(backend, spec, X=np.ones((3, 1), np.float32)))["Y"]
    assert got.tolist() == [[2], [2], [2]]


def test_missing_parts_of_entries_are_completed(folder: Path) -> None:
    config = """
    max_batch_size: 8
    input [ { name: "X" data_type: TYPE_FP32 } ]
    output [ { name: "Y" dims: [ 3 ] label_filename: "names" } ]
    dynamic_batching { preferred_batch_size: 4 }
    """
    directory = adder(folder, ["N", 3], config=config)
    (folder / "names").write_text("a\nb\nc\n")
    _, spec = load(directory)
    assert spec.outputs[0].labels == ("a", "b", "c")
    assert (spec.inputs[0].shape, spec.outputs[0].datatype) == ((-1, 3), "FP32")
    entry = json.loads(spec.config.json())["output"][0]
    assert (entry["data_type"], entry["dims"]) == ("TYPE_FP32", [3])


def test_an_unknown_parameter_is_told_and_changes_nothing(folder: Path, caplog) -> None:
    with caplog.at_level("INFO"):
        load(adder(folder, ["N", 3], config=parameters(speed="9")))
    assert "parameters.speed: no effect (it is no option of backend onnxruntime)" in caplog.text


@pytest.mark.parametrize(("level", "name"), [(-1, "BASIC"), (1, "EXTENDED"), (2, "DISABLE_ALL")])
def test_the_graph_level_of_the_configuration(folder: Path, level: int, name: str) -> None:
    config = f"optimization {{ graph {{ level: {level} }} }}"
    backend, _ = load(adder(folder, [2], config=config))
    options = backend._session.get_session_options()  # type: ignore[attr-defined]
    assert options.graph_optimization_level.name.endswith(name)


def test_a_fixed_batch_dimension_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="no variable batch dimension"):
        load(adder(folder, [1, 3], config="max_batch_size: 4"))


def test_an_input_the_configuration_lacks(folder: Path) -> None:
    node = helper.make_node("Add", ["A", "B"], ["Y"])
    ends = [value("A", T.FLOAT, [2]), value("B", T.FLOAT, [2])], [value("Y", T.FLOAT, [2])]
    config = 'input [ { name: "A" data_type: TYPE_FP32 dims: [ 2 ] } ]'
    with pytest.raises(ConfigError, match="lacks input 'B'"):
        load(save(folder, [node], *ends, config=config))


def test_options_are_taken(folder: Path) -> None:
    config = parameters(
        intra_op_thread_count="2", inter_op_thread_count="0", execution_mode="1", rerun="true",
        graph_optimization_level="basic", enable_mem_arena="0", enable_mem_pattern="0",
    )  # fmt: skip
    backend, spec = load(adder(folder, [2], config=config))
    options = backend._session.get_session_options()  # type: ignore[attr-defined]
    assert options.intra_op_num_threads == 2
    assert options.log_severity_level == 3
    assert not options.enable_cpu_mem_arena
    assert arrays(ask(backend, spec, X=np.ones(2, np.float32)))["Y"].tolist() == [2, 2]


def test_an_arena_that_is_off_cannot_shrink(folder: Path) -> None:
    told = {"memory.enable_memory_arena_shrinkage": "gpu:1;cpu:0", "enable_mem_arena": "0"}
    with pytest.raises(ConfigError, match="'gpu:1;cpu:0': the arena of cpu:0 is off"):
        load(adder(folder, [2], config=parameters(**told)))


@pytest.mark.parametrize("count", [1, 2, 256])
def test_an_instance_has_its_share_of_the_cores(folder: Path, count: int) -> None:
    backend, _ = load(adder(folder, [2], config=f"instance_group [ {{ count: {count} }} ]"))
    options = backend._session.get_session_options()  # type: ignore[attr-defined]
    assert options.intra_op_num_threads == max(1, len(os.sched_getaffinity(0)) // count)


def test_broken_files_fail_without_a_path(folder: Path) -> None:
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(b"not a model")
    with pytest.raises(ShmserveError) as caught:
        load(str(folder))
    assert str(folder) not in caught.value.message
    assert "/" not in caught.value.message


def test_without_onnxruntime(folder: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ConfigError, match=r"needs the extra 'onnx': pip install"):
        load(adder(folder, [2]))


# -------------------------------------------------------------------- running


def offered(directory: str, **inputs: np.ndarray[Any, Any]) -> dict[str, bool]:
    """Run the model; return output name -> whether the output was written into the offered
    array."""
    backend, spec = load(directory)
    request = FakeBackendRequest(tuple(o.name for o in spec.outputs), **inputs)  # type: ignore[arg-type]
    got = arrays(backend.execute([request])[0])
    return {name: got[name] is request.offered.get(name) for name in got}


@pytest.mark.parametrize("dims", [[2, 3], ["N", 3], ["N", "M"]])
def test_known_shapes_are_written_into_the_offer(folder: Path, dims: Dims) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert offered(adder(folder, dims), X=x) == {"Y": True}


def test_inputs_are_bound_where_they_lie(folder: Path, monkeypatch) -> None:
    backend, _spec = load(adder(folder, ["N"]))
    seen: list[int] = []
    binding = backend._binding  # type: ignore[attr-defined]
    original = binding.bind_input
    monkeypatch.setattr(binding, "bind_input", lambda *a: (seen.append(a[-1]), original(*a)))
    request = FakeBackendRequest(("Y",), X=np.ones(5, np.float32))
    assert arrays(backend.execute([request])[0])["Y"].tolist() == [2] * 5
    assert seen == [request.inputs["X"].memory.ctypes.data]


def test_unknown_shapes_stay_with_onnxruntime(folder: Path) -> None:
    node = helper.make_node("NonZero", ["X"], ["Y"])
    directory = save(folder, [node], [value("X", T.FLOAT, ["N"])], [value("Y", T.INT64, [1, "K"])])
    backend, spec = load(directory)
    request = FakeBackendRequest(("Y",), X=np.array([0, 5, 0, 7], np.float32))
    got = arrays(backend.execute([request])[0])["Y"]
    assert request.offered == {}
    assert got.tolist() == [[1, 3]]
    later = arrays(ask(backend, spec, X=np.zeros(4, np.float32)))["Y"]
    assert later.shape == (1, 0)
    assert got.tolist() == [[1, 3]]  # the first answer has separate memory


def test_symbols_that_do_not_hold_are_given_up(folder: Path) -> None:
    """The graph promises Y: [N] but gives [2N]; the first request finds out."""
    node = helper.make_node("Concat", ["X", "X"], ["Y"], axis=0)
    directory = save(folder, [node], [value("X", T.FLOAT, ["N"])], [value("Y", T.FLOAT, ["N"])])
    backend, spec = load(directory)
    for _ in range(2):
        assert arrays(ask(backend, spec, X=np.ones(3, np.float32)))["Y"].shape == (6,)


@pytest.mark.parametrize("requested", [("A",), ("B",), ("B", "A")])
def test_only_requested_outputs(folder: Path, requested: tuple[str, ...]) -> None:
    nodes = [helper.make_node("Neg", ["X"], ["A"]), helper.make_node("NonZero", ["X"], ["B"])]
    outputs = [value("A", T.FLOAT, ["N"]), value("B", T.INT64, [1, None])]
    backend, spec = load(save(folder, nodes, [value("X", T.FLOAT, ["N"])], outputs))
    got = arrays(ask(backend, spec, requested, X=np.array([1, 0], np.float32)))
    assert tuple(got) == requested
    if "A" in got:
        assert got["A"].tolist() == [-1, 0]
    if "B" in got:
        assert got["B"].tolist() == [[0]]


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        (T.FLOAT16, np.float16),
        (T.BFLOAT16, ml_dtypes.bfloat16),
        (T.DOUBLE, np.float64),
        (T.INT64, np.int64),
        (T.UINT8, np.uint8),
        (T.BOOL, np.bool_),
    ],
)
@pytest.mark.parametrize("known", [True, False])
def test_datatypes(folder: Path, kind: int, dtype: Any, known: bool) -> None:
    node = helper.make_node("Identity", ["X"], ["Y"])
    ends = [value("X", kind, ["N"])], [value("Y", kind, ["N" if known else "K"])]
    backend, spec = load(save(folder, [node], *ends))
    x = np.array([1, 0, 1]).astype(dtype)
    got = arrays(ask(backend, spec, X=x))["Y"]
    assert got.dtype == x.dtype
    np.testing.assert_array_equal(got, x)


def test_empty_and_scalar_tensors(folder: Path) -> None:
    backend, spec = load(adder(folder, ["N"]))
    assert arrays(ask(backend, spec, X=np.zeros(0, np.float32)))["Y"].shape == (0,)
    for config in ("", None):  # told or not: a scalar has dims [1]
        backend, spec = load(adder(folder.parent / f"scalar{config}", [], config=config))
        assert spec.inputs[0].shape == (1,)
        assert arrays(ask(backend, spec, X=np.array([3], np.float32)))["Y"].tolist() == [6]


def test_strings(folder: Path) -> None:
    node = helper.make_node("Identity", ["X"], ["Y"])
    ends = [value("X", T.STRING, ["N"])], [value("Y", T.STRING, ["N"])]
    backend, spec = load(save(folder, [node], *ends))
    assert spec.inputs[0].datatype == "BYTES"
    got = arrays(ask(backend, spec, X=np.array([b"a", "ä".encode()], object)))["Y"]
    assert got.tolist() == ["a", "ä"]
    error = ask(backend, spec, X=np.array([b"\xff"], object)).error
    assert isinstance(error, InvalidArgument)
    assert "'X' has an element that is not UTF-8" in error.message


def test_shapes_that_do_not_go_together_are_the_clients_mistake(folder: Path) -> None:
    node = helper.make_node("Add", ["A", "B"], ["Y"])
    inputs = [value("A", T.FLOAT, ["N"]), value("B", T.FLOAT, ["M"])]
    backend, spec = load(save(folder, [node], inputs, [value("Y", T.FLOAT, [None])]))
    good = ask(backend, spec, A=np.ones(3, np.float32), B=np.ones(1, np.float32))
    assert arrays(good)["Y"].tolist() == [2, 2, 2]
    bad = ask(backend, spec, A=np.ones(3, np.float32), B=np.ones(2, np.float32))
    assert "/" not in bad.error.message
    assert ask(backend, spec, A=np.ones(1, np.float32)).error.code is Code.INVALID_ARGUMENT
    good = ask(backend, spec, A=np.ones(1, np.float32), B=np.ones(1, np.float32))
    assert arrays(good)["Y"].tolist() == [2]  # nothing of the failures is left behind


def test_errors_of_the_request_pass(folder: Path) -> None:
    class Full(FakeBackendRequest):
        def offer(self, *_arguments: Any) -> Any:
            raise ArenaExhausted("no room")

    backend, _ = load(adder(folder, ["N"]))
    response = backend.execute([Full(("Y",), X=np.ones(1, np.float32))])[0]
    assert isinstance(response.error, ArenaExhausted)


def test_digits_reads_its_sample() -> None:
    request = json.loads(Path("workers/digits/sample.json").read_text())
    (tensor,) = request["inputs"]
    image = np.array(tensor["data"], np.float32).reshape(tensor["shape"])
    backend, spec = load("workers/digits")
    got = arrays(ask(backend, spec, image=image))
    assert got["label"].shape == (1,)
    assert got["probabilities"].shape == (10,)
    assert int(got["label"][0]) == int(got["probabilities"].argmax())
    picture = Path("workers/digits/sample.pgm").read_text().split()
    grey = 16 - np.array(picture[-64:], int).reshape(8, 8)
    np.testing.assert_array_equal(grey, image)
    assert f"handwritten {int(got['label'][0])}\n" in Path("workers/digits/sample.pgm").read_text()
