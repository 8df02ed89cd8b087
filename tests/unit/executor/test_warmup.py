"""Sample requests before a model is ready: contents, and errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from shmserve.errors import ConfigError, ModelFailure, ShmserveError
from shmserve.tensor import bytes_codec
from tests.backend_runner import load
from tests.model_files import Make, model_maker, native

CONFIG = """
backend: "python"
max_batch_size: %d
input [ { name: "X" data_type: TYPE_%s dims: [ -1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ -1 ] } ]
model_warmup [ { name: "w" %s inputs { key: "X" value { data_type: TYPE_%s dims: [ 3 ] %s } } } ]
"""
SEEN: list[np.ndarray] = []  # inputs of each run of the model
BODY = """
from tests.unit.executor import test_warmup
test_warmup.SEEN.append(request.input("X").copy())
assert not request.cancelled and request.requested == ("Y",) and request.id == "warmup w"
request.output("Y", request.input("X").shape)[...] = 0
"""


@pytest.fixture
def make(tmp_path):
    SEEN.clear()
    return model_maker(tmp_path)


def config(kind: str, data: str, batch: int = 0, more: str = "") -> str:
    return CONFIG % (batch, kind, more, kind, data)


@pytest.mark.parametrize("kind", ["INT8", "UINT64", "INT64", "BOOL", "FP16", "FP64"])
def test_random_data_is_of_the_right_kind(make: Make, kind: str) -> None:
    load(make(native(BODY), config(kind, "random_data: true", more="count: 2")))
    first, second = SEEN
    assert first.shape == (3,)
    np.testing.assert_array_equal(first, second)
    assert np.isfinite(first.astype(float)).all()


def test_zeros_in_a_batch(make: Make) -> None:
    load(make(native(BODY), config("FP32", "zero_data: true", 4, "batch_size: 3")))
    assert SEEN[0].tolist() == [[0] * 3] * 3
    load(make(native(BODY), config("FP32", "zero_data: true", 4), name="one"))
    assert SEEN[1].shape == (1, 3)


@pytest.mark.parametrize(("data", "empty"), [("zero_data", True), ("random_data", False)])
def test_strings(make: Make, data: str, empty: bool) -> None:
    load(make(native(BODY), config("STRING", f"{data}: true")))
    assert [element == b"" for element in SEEN[0]] == [empty] * 3


def with_file(make: Make, kind: str, data: bytes | None, name: str = "m") -> str:
    """Return a model whose sample is in a file, which None leaves out."""
    directory = make(native(BODY), config(kind, "input_data_file: 'x.raw'"), name=name)
    if data is not None:
        (Path(directory) / "warmup").mkdir()
        (Path(directory) / "warmup" / "x.raw").write_bytes(data)
    return directory


def test_a_file(make: Make, tmp_path) -> None:
    for name, kind, data in (
        ("number", "FP32", np.arange(3, dtype=np.float32).tobytes()),
        ("text", "STRING", bytes_codec.encode([b"a", "ä", b""])),
    ):
        load(with_file(make, kind, data, name))
    assert [seen.tolist() for seen in SEEN] == [[0, 1, 2], [b"a", "ä".encode(), b""]]


@pytest.mark.parametrize(
    ("kind", "data", "reason"),
    [
        ("FP32", None, r"'x.raw' cannot be read \(No such file"),
        ("FP32", b"1234", "'x.raw' has 4 bytes, expected 12"),
        ("STRING", b"1234", "'x.raw': .*string"),
    ],
)
def test_a_wrong_file(make: Make, kind: str, data: bytes | None, reason: str) -> None:
    directory = with_file(make, kind, data)
    with pytest.raises(ConfigError, match=reason) as caught:
        load(directory)
    assert "model 'm': model_warmup 'w': input 'X'" in caught.value.message
    assert directory not in caught.value.message


ZERO = "zero_data: true"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (('key: "X"', 'key: "Q"'), "input 'Q': the model has no such input"),
        (("TYPE_FP32 dims: [ 3 ]", "TYPE_INT8 dims: [ 3 ]"), "is INT8, the model's is FP32"),
        (("dims: [ 3 ]", "dims: [ 3, 3 ]"), r"shape \[3, 3\], the model's is \[-1\]"),
        (("output [", 'input [ { name: "Z" data_type: TYPE_INT8 dims: 1 } ] output ['), "'Z' is"),
    ],
)
def test_a_sample_that_does_not_fit(make: Make, change: tuple[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load(make(native(BODY), config("FP32", ZERO).replace(*change)))


def test_a_sample_on_which_the_model_fails(make: Make) -> None:
    with pytest.raises(ModelFailure, match="model 'm': model_warmup 'w': too cold") as caught:
        load(make(native("raise ValueError('too cold')"), config("FP32", ZERO)))
    assert isinstance(caught.value, ShmserveError)


def test_a_model_without_samples_is_not_run(make: Make) -> None:
    load(make(native(BODY), config("FP32", ZERO).partition("model_warmup")[0]))
    assert SEEN == []
