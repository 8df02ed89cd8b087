"""Requests against models: shapes, sizes, batches, raw deduction, classification."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve.config import Settings
from shmserve.errors import InvalidArgument, NotFound, TooLarge, Unimplemented
from shmserve.frontends.oip import classification
from shmserve.frontends.oip.classification import top_classes
from shmserve.protocol import bounds
from shmserve.protocol.control.data_messages import OutputPlace, RegionRef
from shmserve.protocol.oip.model_signature import ModelSignature, deduce, make_signature
from shmserve.protocol.oip.request import InferInput, InferOutput, InferRequest, RegionWindow
from shmserve.protocol.oip.validation import check_inputs, check_outputs, refuse_decoupled
from shmserve.tensor.spec import ModelSpec, TensorSpec
from tests.fake_models import spec

LIMITS = Settings()


def nowhere(model: ModelSpec, window: RegionWindow) -> RegionRef:
    raise NotFound(f"Unable to find shared memory region: '{window.region}'")


def one(
    shape: tuple[int, ...], nbytes: int | None = None, datatype: str = "FP32", name: str = "INPUT0"
) -> InferInput:
    return InferInput(name, shape, datatype, "inputs[0]", None, nbytes)


def two(shape: tuple[int, ...], nbytes: int) -> list[InferInput]:
    return [one(shape, nbytes), one(shape, nbytes, name="INPUT1")]


def check(signature: ModelSignature, *inputs: InferInput, limits: Settings = LIMITS) -> list[int]:
    return [item.nbytes for item in check_inputs(signature, InferRequest(inputs), limits, nowhere)]


IDENTITY = make_signature(spec("m", "FP32", (-1,)))
ADD_SUB = make_signature(spec("m", "INT32", (16,), 2, 2))
PLANE = make_signature(spec("m", "FP32", (-1, -1)))
BATCHED = make_signature(spec("m", "FP32", (4,), 2, 1, max_batch=8))


def test_sizes_come_from_shapes() -> None:
    assert check(IDENTITY, one((0,), 0)) == [0]
    assert check(IDENTITY, one((3,), 12)) == [12]
    signature = make_signature(spec("m", "BYTES", (-1,)))
    assert check(signature, one((2,), 9, "BYTES")) == [9]
    assert check(signature, one((2,), None, "BYTES")) == [-1]
    assert check(BATCHED, *two((3, 4), 48)) == [48, 48]


@pytest.mark.parametrize(
    ("signature", "inputs", "message"),
    [
        (
            IDENTITY,
            [one((), 4)],
            r"unexpected shape for input 'INPUT0' .* Expected \[-1\], got \[\]",
        ),
        (IDENTITY, [one((1, 1), 4)], r"Expected \[-1\], got \[1,1\]"),
        (IDENTITY, [one((1,), 4, "INT32")], "data-type is 'INT32', but model 'm' expects 'FP32'"),
        (
            IDENTITY,
            [one((1,), 4, "fp32")],
            "invalid datatype 'fp32' for input INPUT0: model 'm' expects 'FP32'",
        ),
        (IDENTITY, [one((8,), 16)], "byte size mismatch .* Expected 32, got 16"),
        (IDENTITY, [one((1 << 40,), 16)], "Expected 4398046511104, got 16"),
        (IDENTITY, [one(((1 << 40) + 1,), 16)], "total element count to exceed"),
        (IDENTITY, [one((1 << 60,), None)], "causes total element count to exceed maximum size of"),
        (IDENTITY, [one((1 << 62,), None)], "byte size overflow for input 'INPUT0'"),
        (
            PLANE,
            [one((1 << 4, (1 << 60) + 2), None)],
            "causes total element count to exceed maximum size of",
        ),
        (IDENTITY, [], "expected 1 inputs but got 0 inputs for model 'm'"),
        (ADD_SUB, [one((1,), 8, "FP64")], "expected 2 inputs but got 1 inputs for model 'm'"),
        (
            ADD_SUB,
            [one((16,), 64, "INT32"), one((16,), 64, "INT32", "NOPE")],
            r"unexpected inference input 'NOPE' for model 'm', whose inputs are"
            r" \['INPUT0','INPUT1'\]$",
        ),
        (
            ADD_SUB,
            [one((16,), 64, "INT32")],
            r"Got input\(s\) \['INPUT0'\], but missing required input\(s\) \['INPUT1'\]",
        ),
        (ADD_SUB, [one((15,), 60, "INT32")] * 2, r"Expected \[16\], got \[15\]"),
        (BATCHED, [one((), 16), one((1, 4), 16)], "has no shape but model requires batch"),
        (BATCHED, [one((4,), 16)] * 2, r"got \[4\]. NOTE"),
        (BATCHED, two((9, 4), 144), "batch-size must be <= 8 for 'm', got 9"),
        (BATCHED, two((0, 4), 0), "batch-size must be >= 1 for 'm': input 'INPUT0' has no row"),
        (
            BATCHED,
            [one((2, 4), 32), one((1, 4), 16, name="INPUT1")],
            "input 'INPUT0' batch size does not match other inputs for 'm'",
        ),
        (
            ADD_SUB,
            [*two((16,), 64), one((16,), 64, "INT32", "NOPE")],
            r"expected 2 inputs but got 3 inputs for model 'm'. Got input\(s\)"
            r" \['INPUT0','INPUT1','NOPE'\], but missing required input\(s\) \[\]",
        ),
        (BATCHED, [one((4,), 16, "INT32"), one((), 4, name="INPUT1")], "'INPUT1' has no shape"),
        (ADD_SUB, [one((9,), 9, "INT32"), one((9,), 9, "INT32", "INPUT1")], "input 'INPUT1' for"),
        (
            ADD_SUB,
            [one((16,), 64, "FP64"), one((16,), 9, "INT32", "INPUT1")],
            "input 'INPUT0' data-type",
        ),
        (
            ADD_SUB,
            [one((16,), 8, "INT32"), one((16,), 9, "INT32", "INPUT1")],
            "input 'INPUT1' for model 'm'. Expected 64, got 9",
        ),
        (ADD_SUB, [one((9,), 9, "fp64"), one((9,), 9, "INT32", "NOPE")], "invalid datatype 'fp64'"),
    ],
)
def test_misfits_are_named(signature, inputs, message) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        check(signature, *inputs)
    assert caught.value.message.startswith("[request id: <id_unknown>] ")
    assert caught.value.http_status == 400


def test_half_floats_do_not_come_as_json() -> None:
    signature = make_signature(spec("m", "FP16", (-1,)))
    with pytest.raises(InvalidArgument, match="receiving FP16 data via JSON is not supported"):
        check(signature, one((1,), None, "FP16"))


def test_a_tensor_may_be_too_large() -> None:
    refusal = r"exceeds the maximum allowed value of 39 .*max_tensor_bytes"
    with pytest.raises(TooLarge, match=refusal):
        check(IDENTITY, one((10,), 40), limits=Settings(max_tensor_bytes=39))


def test_optional_inputs_may_be_left_out() -> None:
    inputs = (TensorSpec("INPUT0", "FP32", (1,)), TensorSpec("INPUT1", "FP32", (1,), optional=True))
    signature = make_signature(ModelSpec("m", "1", "", "python", 0, inputs, ()))
    assert check(signature, one((1,), 4)) == [4]
    with pytest.raises(
        InvalidArgument, match="expected number of inputs between 1 and 2 but got 1"
    ):
        check(signature, one((1,), 4, name="INPUT1"))


def test_regions_are_looked_up_last() -> None:
    source = InferInput("INPUT0", (1,), "FP32", "inputs[0]", region=RegionWindow("r", 0, 4))
    with pytest.raises(NotFound, match="Unable to find shared memory region: 'r'"):
        check(IDENTITY, source)
    request = InferRequest((), (InferOutput("OUTPUT0", region=RegionWindow("r", 0, 4)),))
    with pytest.raises(NotFound, match="Unable to find shared memory region: 'r'"):
        check_outputs(IDENTITY, request, nowhere)
    wrong = InferInput("INPUT0", (1,), "FP32", "inputs[0]", region=RegionWindow("r", 0, 5))
    with pytest.raises(InvalidArgument, match="byte size mismatch"):
        check(IDENTITY, wrong)


def test_regions_become_places() -> None:
    at = RegionRef(7, 0, 4)
    request = InferRequest(
        (InferInput("INPUT0", (1,), "FP32", "inputs[0]", region=RegionWindow("r", 0, 4)),),
        (InferOutput("OUTPUT0", region=RegionWindow("r", 0, 4)),),
    )
    assert check_inputs(IDENTITY, request, Settings(), lambda *_: at)[0].at == at
    assert check_outputs(IDENTITY, request, lambda *_: at)[1] == (OutputPlace("OUTPUT0", at),)


def test_names_that_an_error_lists_are_bounded() -> None:
    tensors = tuple(TensorSpec(f"{'x' * 100}{n}", "FP32", (1,)) for n in range(40))
    signature = make_signature(ModelSpec("m", "1", "", "python", 0, tensors, tensors))
    with pytest.raises(InvalidArgument, match=r"'x{64}…'\] and 24 more$") as told:
        check(signature, *[one((1,), 4)] * len(tensors))
    assert len(told.value.message) < 1500


def test_outputs_default_to_all() -> None:
    wanted, _ = check_outputs(ADD_SUB, InferRequest(()), nowhere)
    assert [output.name for output in wanted] == ["OUTPUT0", "OUTPUT1"]


def test_wrong_outputs_are_refused_before_the_model_runs() -> None:
    with pytest.raises(InvalidArgument, match=r"output 'NOPE' .* are \['OUTPUT0','OUTPUT1'\]$"):
        check_outputs(ADD_SUB, InferRequest((), (InferOutput("NOPE"),)), nowhere)
    half = make_signature(spec("m", "FP16", (-1,)))
    with pytest.raises(InvalidArgument, match="sending FP16 data via JSON"):
        check_outputs(half, InferRequest(()), nowhere)
    as_json = (InferOutput("OUTPUT0", binary=False),)
    with pytest.raises(InvalidArgument, match="sending FP16 data via JSON"):
        check_outputs(half, InferRequest((), as_json, binary_output=True), nowhere)
    assert check_outputs(half, InferRequest((), binary_output=True), nowhere)
    with pytest.raises(InvalidArgument, match="unsupported type 'FP16': output 'OUTPUT0'"):
        check_outputs(half, InferRequest((), (InferOutput("OUTPUT0", 1, True),)), nowhere)


def test_decoupled_models_are_refused() -> None:
    with pytest.raises(Unimplemented, match="decoupled transaction policy"):
        refuse_decoupled(make_signature(spec("m", "INT32", (1,), decoupled=True)), "This")


@pytest.mark.parametrize(
    ("model", "nbytes", "shape", "size"),
    [
        (spec("m", "FP32", (-1,)), 16, (4,), 16),
        (spec("m", "FP32", (-1,)), 0, (0,), 0),
        (spec("m", "FP32", (-1, 4)), 32, (2, 4), 32),
        (spec("m", "FP32", (4,), max_batch=8), 16, (1, 4), 16),
        (spec("m", "BYTES", (1,)), 5, (1,), 9),
        (spec("m", "BYTES", (1,), max_batch=2), 5, (1, 1), 9),
    ],
)
def test_raw_requests(model: ModelSpec, nbytes: int, shape: tuple[int, ...], size: int) -> None:
    request = deduce(make_signature(model), nbytes)
    assert request.binary_output
    assert (request.inputs[0].shape, request.inputs[0].binary_size) == (shape, size)


@pytest.mark.parametrize(
    ("model", "nbytes", "message"),
    [
        (spec("m", "INT32", (16,), 2), 64, "must only have 1 input .* but got 2 inputs in 'm'"),
        (spec("m", "FP32", (-1, -1)), 16, "more than one variable-sized dimension"),
        (spec("m", "FP32", (-1, 4)), 12, "12 bytes are not a multiple of 16"),
        (spec("m", "FP32", (-1, 0)), 12, "not a multiple of 0"),
        (spec("m", "BYTES", (-1,)), 5, r"must have input shape \[1\]"),
    ],
)
def test_raw_requests_that_tell_too_little(model: ModelSpec, nbytes: int, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        deduce(make_signature(model), nbytes)


def classes(array: np.ndarray, datatype: str, k: int, batched: bool = False) -> tuple:
    view = memoryview(array.tobytes())
    return top_classes(view, datatype, array.shape, k, ("zero", "one"), batched)


def test_classification() -> None:
    assert classes(np.array([1, 4.5, 4.5], np.float32), "FP32", 2) == (
        [b"4.500000:1:one", b"4.500000:2"],
        (2,),
    )
    assert classes(np.array([[3, 9], [7, 5]], np.int64), "INT64", 5, True) == (
        [b"9:1:one", b"3:0:zero", b"7:0:zero", b"5:1:one"],
        (2, 2),
    )
    assert classes(np.array([0, (1 << 64) - 1], np.uint64), "UINT64", 1) == (
        [b"18446744073709551615:1:one"],
        (1,),
    )
    assert classes(np.array([-128, 127], np.int8), "INT8", 2)[0] == [b"127:1:one", b"-128:0:zero"]
    assert classes(np.array([np.nan, -1, np.inf]), "FP64", 3)[0] == [
        b"inf:2",
        b"-1.000000:1:one",
        b"nan:0:zero",
    ]
    assert classes(np.zeros((0, 4), np.float32), "FP32", 2, True) == ([], (0, 2))
    assert classes(np.zeros(0, np.float32), "FP32", 2) == ([], (0,))


@given(
    st.lists(st.sampled_from([np.nan, -np.inf, -1.0, 0.0, 1.0, np.inf]), max_size=40),
    st.integers(1, 50),
    st.integers(1, 10),
)
def test_classification_in_blocks_is_that_of_a_stable_sort(
    values: list[float], k: int, block: int
) -> None:
    row = np.array(values, np.float64)
    best = sorted(range(row.size), key=lambda i: (-np.inf if np.isnan(row[i]) else row[i], -i))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(classification, "_BLOCK", block)
        texts, _ = classes(row, "FP64", k)
    assert [int(text.split(b":")[1]) for text in texts] == best[::-1][:k]


def test_many_elements_are_classified() -> None:
    texts, shape = classes(np.arange(1_000_001, dtype=np.int32), "INT32", 1)
    assert (texts, shape) == ([b"1000000:1000000"], (1,))


def test_classification_takes_memory_for_what_is_wanted() -> None:
    array = np.zeros(16 << 20, np.float32)
    array[-1] = 1
    view = array.data.cast("B")
    tracemalloc.start()
    try:
        texts, _ = top_classes(view, "FP32", array.shape, 2, (), False)
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert texts == [b"1.000000:16777215", b"0.000000:0"]
    assert most < array.nbytes / 2


def test_more_classes_than_the_limit_are_refused(monkeypatch) -> None:
    request = InferRequest((), (InferOutput("OUTPUT0", 5, True),))
    monkeypatch.setattr(bounds, "MAX_CLASSES", 5)
    assert check_outputs(IDENTITY, request, nowhere)
    monkeypatch.setattr(bounds, "MAX_CLASSES", 4)
    refusal = r"output 'OUTPUT0': classification of 5 is more than 4$"
    with pytest.raises(InvalidArgument, match=refusal) as refused:
        check_outputs(IDENTITY, request, nowhere)
    assert refused.type is InvalidArgument  # a number of things, so 400 and not 413
