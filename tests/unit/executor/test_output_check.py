"""Answers of a model against the model's configuration, one answer after the other."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from msgspec import structs

from shmserve.errors import Internal
from shmserve.executor.backends.output_check import OutputCheck
from shmserve.tensor.spec import TensorSpec
from tests.unit.rig import SPEC


@pytest.fixture
def check():
    outputs = (
        TensorSpec("PAIRS", "FP32", (-1, 2)),
        TensorSpec("HALF", "BF16", (1,)),
        TensorSpec("TEXT", "BYTES", (-1,)),
    )
    return OutputCheck(structs.replace(SPEC, outputs=outputs))


def test_each_shape_is_judged_by_itself(check: OutputCheck) -> None:
    """Also right after a shape that fitted."""
    for rows in (3, 3, 5):
        assert check.expect("PAIRS", (rows, 2)).datatype == "FP32"
        (output,) = check.answer(("PAIRS",), {"PAIRS": np.zeros((rows, 2), np.float32)})
        assert output.array.shape == (rows, 2)
        for wrong in ((rows,), (rows, 3), (rows, 2, 1)):
            with pytest.raises(Internal, match=r"must have shape \[-1, 2\]"):
                check.expect("PAIRS", wrong)
            with pytest.raises(Internal, match=r"must have shape \[-1, 2\]"):
                check.answer(("PAIRS",), {"PAIRS": np.zeros(wrong, np.float32)})


def test_an_offered_array_whose_shape_the_model_has_changed_is_refused(check: OutputCheck) -> None:
    array = np.zeros((4, 2), np.float32)
    check.expect("PAIRS", array.shape)
    with pytest.raises(Internal, match=r"got \[2, 4\]"):
        check.answer(("PAIRS",), {"PAIRS": array.reshape(2, 4)})
    with pytest.raises(Internal, match="must have datatype FP32"):
        check.answer(("PAIRS",), {"PAIRS": array.view(np.int32)})


@pytest.mark.parametrize(
    ("elements", "reason"),
    [
        (["a", "\udcff"], "output 'TEXT': string element 1 is not valid Unicode"),
        ([5, "a"], "output 'TEXT' has an element that is no bytes or str"),
        ([None], "output 'TEXT' has an element that is no bytes or str"),
    ],
)
def test_wrong_elements_are_the_models_fault(
    check: OutputCheck, elements: list[object], reason: str
) -> None:
    (output,) = check.answer(("TEXT",), {"TEXT": np.array(elements, object)})
    with pytest.raises(Internal, match=reason):
        output.elements()


def test_outputs_come_in_the_requests_order(check: OutputCheck) -> None:
    given = {
        "TEXT": np.array(["a"]),
        "HALF": np.zeros(1, ml_dtypes.bfloat16),
        "PAIRS": np.zeros((0, 2), np.float32),
    }
    outputs = check.answer(("HALF", "TEXT"), given)
    assert [output.name for output in outputs] == ["HALF", "TEXT"]
    assert outputs[1].array.dtype == object
    assert check.answer(("HALF", "PAIRS"), {}, partial=True) == ()
    with pytest.raises(Internal, match="gave no output 'PAIRS'"):
        check.answer(("HALF", "PAIRS"), {"HALF": given["HALF"]})
