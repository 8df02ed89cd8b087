"""Inputs of a sequence model besides the client's tensors, and the state that is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from msgspec import UNSET
from onnx import TensorProto, helper

from shmserve.errors import ConfigError, InvalidArgument
from shmserve.executor.backend import BatchForm, Output, Response
from shmserve.executor.tensors.memory_input import MemoryInput
from shmserve.executor.wrappers.sequence_backend import SequenceBackend
from shmserve.executor.wrappers.sequence_tensors import States
from shmserve.tensor.config_document import StateEntry
from shmserve.testing.backend_runner import FakeBackendRequest, arrays, failure, load
from shmserve.testing.model_files import Make
from tests.unit.rig import SPEC

CONTROLS = """
  control_input [
    { name: "START" control [ { kind: CONTROL_SEQUENCE_START fp32_false_true: [ -1, 2 ] } ] },
    { name: "END" control [ { kind: CONTROL_SEQUENCE_END bool_false_true: [ true, false ] } ] },
    { name: "READY" control [ { kind: CONTROL_SEQUENCE_READY int32_false_true: [ 5, 6 ] } ] },
    { name: "ID" control [ { kind: CONTROL_SEQUENCE_CORRID data_type: %s } ] }
  ]
"""
CONFIG = """
backend: "python"
max_batch_size: %s
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } %s ]
sequence_batching {
  direct { }
  %s
  state [ { input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: [ -1 ] %s } ]
}
"""
ADDS = """
class Model:
    seen = []
    def infer(self, request):
        self.seen.append({name: request.input(name).tolist() for name in request.inputs})
        if request.input("X").min() < 0:
            raise ValueError("as it was told")
        total = request.input("S") + request.input("X")
        return {"Y": total, "T": total}
"""
TRITON = """
import triton_python_backend_utils as pb_utils
class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            x, s, ready = (
                pb_utils.get_input_tensor_by_name(request, name).as_numpy()
                for name in ("X", "S", "READY")
            )
            value = s + x + 100 * (len(requests) - 1)
            answers.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("Y", value), pb_utils.Tensor("T", s + ready.astype(s.dtype))]))
        return answers
"""


def config(
    batch: int = 4, outputs: str = "", id_type: str = "TYPE_INT32", initial: str = ""
) -> str:
    return CONFIG % (batch, outputs, CONTROLS % id_type, initial)


def started(directory: str) -> SequenceBackend:
    backend, _ = load(directory)
    assert isinstance(backend, SequenceBackend)
    return backend


def step(
    x: float, sequence: Any, *flags: str, shape: tuple[int, ...] = (1, 1)
) -> FakeBackendRequest:
    told = {f"sequence_{flag}": True for flag in flags}
    array = np.full(shape, x, np.float32)
    return FakeBackendRequest(("Y",), {"sequence_id": sequence, **told}, X=array)


def run(backend: SequenceBackend, *requests: FakeBackendRequest) -> list[Response]:
    """Execute as the loop does when every answer could be placed."""
    responses = list(backend.execute(requests))
    for request, response in zip(requests, responses, strict=True):
        backend.states.settle(request.parameters["sequence_id"], response.error is None)  # type: ignore[arg-type]
    return responses


def ys(*responses: Response) -> list[float]:
    assert [list(arrays(response)) for response in responses] == [["Y"]] * len(responses)
    return [arrays(response)["Y"].item() for response in responses]


def test_a_model_is_told_of_its_sequence(make: Make) -> None:
    code = ADDS.replace("infer(", "infer_batch(") + "    infer = infer_batch\n"
    backend = started(make(code, config()))
    model = backend.load.__self__._dialect._model  # type: ignore[attr-defined]
    run(backend, step(3, 7, "start"))
    run(backend, step(3, 7, "end"))
    assert model.seen[-2:] == [
        {"X": [[3]], "START": [[2]], "END": [[True]], "READY": [[6]], "ID": [[7]], "S": [[0]]},
        {"X": [[3]], "START": [[-1]], "END": [[False]], "READY": [[6]], "ID": [[7]], "S": [[3]]},
    ]


@pytest.mark.parametrize(("batch", "shape"), [(0, (1,)), (4, (1, 1))])
def test_states_are_each_sequences_own(make: Make, batch: int, shape: tuple[int, ...]) -> None:
    backend = started(make(ADDS, config(batch)))

    def ask(x: float, sequence: Any, *flags: str) -> float:
        return ys(*run(backend, step(x, sequence, *flags, shape=shape)))[0]

    assert [ask(1, 1, "start"), ask(5, 2, "start"), ask(1, 1), ask(5, 2)] == [1, 5, 2, 10]
    assert "as it was told" in failure(run(backend, step(-1, 1, shape=shape))[0]).message
    assert ask(1, 1) == 3  # the failed request has changed nothing
    assert ask(1, 1, "start") == 1
    backend.states.forget(2)
    assert ask(1, 2) == 1
    backend.execute([step(7, 2, shape=shape)])
    backend.states.settle(2, succeeded=False)  # the answer could not be placed
    assert ask(1, 2) == 2


def test_a_state_that_is_not_given_stays() -> None:
    entries = [StateEntry(name, f"NEW_{name}", "TYPE_FP32", (1,)) for name in ("A", "B")]
    states = States(SPEC, tuple(entries), "")

    def run(**given: float) -> dict[str, float]:
        states.keep(7, {name: np.float32([value]) for name, value in given.items()})  # type: ignore[arg-type, misc]
        states.settle(7, succeeded=True)
        return {name: float(array[0]) for name, (_, array) in states.arrays(7, False).items()}

    assert run(NEW_A=1, NEW_B=2) == {"A": 1, "B": 2}
    assert run(NEW_A=3) == {"A": 3, "B": 2}
    assert run() == {"A": 3, "B": 2}


def test_one_tensor_for_all_has_a_row_for_each_slot(make: Make) -> None:
    code = ADDS.replace("infer(", "infer_batch(") + "    infer = infer_batch\n"
    backend = started(make(code, config()))
    model = backend.load.__self__._dialect._model  # type: ignore[attr-defined]
    slots = {4: 0, 9: 3}
    backend.slot_of = slots.__getitem__  # type: ignore[assignment]
    assert ys(*run(backend, step(1, 4, "start"), step(2, 9, "start"))) == [1, 2]
    assert model.seen[-1]["READY"] == [[6], [5], [5], [6]]
    assert model.seen[-1]["X"] == [[1], [0], [0], [2]]
    assert model.seen[-1]["ID"] == [[4], [0], [0], [9]]
    assert ys(*run(backend, step(1, 9))) == [3]
    assert model.seen[-1]["S"] == [[0], [0], [0], [2]]


def test_a_list_of_requests_has_one_for_each_slot(make: Make) -> None:
    backend = started(make(TRITON, config()))
    backend.slot_of = {4: 1}.__getitem__  # type: ignore[assignment]
    assert ys(*run(backend, step(1, 4, "start"))) == [101]
    backend.slot_of = None
    assert ys(*run(backend, step(1, 4), step(2, 5, "start"))) == [107, 102]


def test_a_gap_has_no_place_among_its_neighbours_outputs(make: Make) -> None:
    backend = started(make(TRITON, config()))
    offered: list[Any] = []

    class Offering:
        batching = BatchForm.LISTED

        def execute(self, requests: Any) -> list[Response]:
            answers = []
            for number, request in enumerate(requests):
                outputs = []
                for name in request.requested:
                    array = request.offer(name, "FP32", (1, 1))
                    array[:] = number
                    outputs.append(Output(name, "FP32", array))
                offered.append((request.id, request.cancelled, request.deadline_ns))
                answers.append(Response(tuple(outputs)))
            return answers

    backend._backend = Offering()  # type: ignore[assignment]
    backend.slot_of = {4: 2, 5: 3}.__getitem__  # type: ignore[assignment]
    first, second = step(1, 4, "start"), step(2, 5, "start")
    first.cancelled, first.deadline_ns = True, 9
    assert ys(*run(backend, first, second)) == [2, 3]
    assert [each.offered["Y"].item() for each in (first, second)] == [2, 3]
    gap = ("", False, 0)
    assert offered == [gap, gap, ("request-1", True, 9), ("request-1", False, 0)]


def test_initial_states_come_from_a_file(make: Make) -> None:
    initial = 'initial_state [ { data_type: TYPE_FP32 dims: [ 1 ] data_file: "first" name: "f" } ]'
    directory = make(ADDS, config(initial=initial))
    with pytest.raises(ConfigError, match="data_file 'first' cannot be read"):
        load(directory)
    folder = Path(directory) / "initial_state"
    folder.mkdir()
    (folder / "first").write_bytes(b"123")
    with pytest.raises(ConfigError, match="data_file 'first' has 3 bytes, expected 4"):
        load(directory)
    (folder / "first").write_bytes(np.float32(40).tobytes())
    assert ys(*run(started(directory), step(2, 1, "start"))) == [42]


@pytest.mark.parametrize(
    ("id_type", "sequence", "fits"),
    [
        ("TYPE_INT32", 1 << 31, False),
        ("TYPE_UINT32", 1 << 31, True),
        ("TYPE_INT64", 1 << 63, False),
        ("TYPE_UINT64", (1 << 64) - 1, True),
        ("TYPE_UINT64", "one", False),
        ("TYPE_STRING", "one", True),
        ("TYPE_STRING", 1, True),
    ],
)
def test_an_id_must_fit_its_type(make: Make, id_type: str, sequence: Any, fits: bool) -> None:
    backend = started(make(ADDS, config(id_type=id_type)))
    if not fits:
        with pytest.raises(InvalidArgument, match=f"does not fit {id_type}"):
            backend.controls.check(sequence)
        return
    backend.controls.check(sequence)
    assert ys(*run(backend, step(1, sequence, "start"))) == [1]


def test_a_state_that_clients_are_told_of_is_theirs_too(make: Make) -> None:
    outputs = ', { name: "T" data_type: TYPE_FP32 dims: [ -1 ] }'
    backend, spec = load(make(ADDS, config(outputs=outputs)))
    assert [tensor.name for tensor in spec.inputs + spec.outputs] == ["X", "Y", "T"]
    for expected in (3, 6):
        request = step(3, 1, "start" if expected == 3 else "")
        request.requested = ("T", "Y")
        (response,) = run(backend, request)  # type: ignore[arg-type]
        assert {k: v.item() for k, v in arrays(response).items()} == {"T": expected, "Y": expected}


def test_an_onnx_model_describes_itself_without_its_states(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    (folder / "1").mkdir(parents=True)
    values = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["N", 1])
        for name in ("X", "S", "Y", "T")
    ]
    nodes = [helper.make_node("Add", ["X", "S"], [name]) for name in "YT"]
    graph = helper.make_graph(nodes, "g", values[:2], values[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(
        'backend: "onnxruntime" sequence_batching { '
        'state [ { input_name: "S" output_name: "T" data_type: TYPE_FP32 dims: [ 1 ] } ] }'
    )
    backend, spec = load(str(folder))
    assert (spec.max_batch_size, spec.config.dynamic_batching) == (4, UNSET)
    assert [tensor.name for tensor in spec.inputs + spec.outputs] == ["X", "Y"]
    assert [entry.name for entry in (*spec.config.input, *spec.config.output)] == ["X", "Y"]  # type: ignore[attr-defined]
    assert ys(*run(backend, step(1, 1, "start"), step(5, 2, "start"))) == [1, 5]  # type: ignore[arg-type]
    assert ys(*run(backend, step(1, 2), step(1, 1))) == [6, 2]  # type: ignore[arg-type]


def test_samples_that_warm_a_model_up_belong_to_no_sequence(make: Make) -> None:
    sample = """
    model_warmup [ { name: "one" batch_size: 1 inputs { key: "X" value {
        data_type: TYPE_FP32 dims: [ 1 ] zero_data: true } } } ]"""
    backend = started(make(ADDS, config() + sample))
    model = backend.load.__self__._dialect._model  # type: ignore[attr-defined]
    assert [seen["START"] for seen in model.seen] == [[[2]]]
    assert ys(*run(backend, step(2, 1, "start"))) == [2]


def test_a_model_that_writes_into_its_strings_changes_them_for_nobody() -> None:
    given = np.array([b"a", b"b"], object)
    tensor = MemoryInput("X", "BYTES", given, np)
    tensor.numpy()[0] = b"mine"
    assert tensor.numpy().tolist() == [b"a", b"b"]
