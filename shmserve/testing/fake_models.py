"""The conformance models as plain functions, for tests without executors."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from shmserve.errors import Code, ModelFailure
from shmserve.tensor.dtypes import DATATYPES
from shmserve.tensor.spec import ModelSpec, TensorSpec
from shmserve.testing.fake_dispatch import (
    FakeDispatcher,
    FakeOutcome,
    FakeRequest,
    FakeTensor,
    Function,
)


def array_of(tensor: FakeTensor) -> np.ndarray[Any, Any]:
    return np.frombuffer(tensor.view, DATATYPES[tensor.datatype].numpy).reshape(tensor.shape)


def tensor_of(name: str, datatype: str, array: np.ndarray[Any, Any]) -> FakeTensor:
    view = memoryview(array.tobytes()).toreadonly()
    return FakeTensor(name, datatype, tuple(array.shape), view)


def identity(request: FakeRequest) -> FakeOutcome:
    given = request.inputs["INPUT0"]
    return FakeOutcome((FakeTensor("OUTPUT0", given.datatype, given.shape, given.view),))


def add_sub(request: FakeRequest) -> FakeOutcome:
    datatype = request.inputs["INPUT0"].datatype
    a, b = array_of(request.inputs["INPUT0"]), array_of(request.inputs["INPUT1"])
    results = {"OUTPUT0": a + b, "OUTPUT1": a - b}
    wanted = request.requested or tuple(results)
    return FakeOutcome(tuple(tensor_of(name, datatype, results[name]) for name in wanted))


def failing(request: FakeRequest) -> FakeOutcome:
    values = array_of(request.inputs["INPUT0"])
    first = values[0] if values.size else 0
    if first == 1:
        raise ModelFailure("ValueError: boom raised")
    if first == 2:
        raise ModelFailure("boom returned", Code.INVALID_ARGUMENT)
    if first == 3:
        return FakeOutcome()
    if first == 5:
        raise RuntimeError("a secret of /the/server")
    return identity(request)


def spec(
    name: str,
    datatype: str,
    dims: tuple[int, ...],
    inputs: int = 1,
    outputs: int = 1,
    max_batch: int = 0,
    decoupled: bool = False,
    labels: tuple[str, ...] = (),
) -> ModelSpec:
    shape = (-1, *dims) if max_batch else dims
    data_type = DATATYPES[datatype].config_name
    config = {
        "name": name,
        "backend": "python",
        "max_batch_size": max_batch,
        "input": [
            {"name": f"INPUT{i}", "data_type": data_type, "dims": dims} for i in range(inputs)
        ],
        "output": [
            {"name": f"OUTPUT{i}", "data_type": data_type, "dims": dims} for i in range(outputs)
        ],
        "model_transaction_policy": {"decoupled": decoupled},
    }
    return ModelSpec(
        name,
        "1",
        "python",
        "python",
        max_batch,
        tuple(TensorSpec(f"INPUT{i}", datatype, shape) for i in range(inputs)),
        tuple(TensorSpec(f"OUTPUT{i}", datatype, shape, labels=labels) for i in range(outputs)),
        decoupled,
        config_json=msgspec.json.encode(config).decode(),
    )


def models() -> list[tuple[ModelSpec, Function]]:
    return [
        (spec("identity", "FP32", (-1,)), identity),
        (spec("identity_2d", "FP32", (-1, 4)), identity),
        (spec("identity_bf16", "BF16", (-1,)), identity),
        (spec("identity_bool", "BOOL", (-1,)), identity),
        (spec("identity_bytes", "BYTES", (-1,)), identity),
        (spec("identity_fp16", "FP16", (-1,)), identity),
        (spec("identity_int64", "INT64", (-1,)), identity),
        (spec("add_sub", "INT32", (16,), 2, 2), add_sub),
        (spec("add_sub_f32", "FP32", (16,), 2, 2), add_sub),
        (spec("batched", "FP32", (4,), max_batch=8), identity),
        (spec("failing", "FP32", (-1,)), failing),
        (spec("decoupled", "INT32", (1,), decoupled=True), identity),
    ]


def dispatcher() -> FakeDispatcher:
    return FakeDispatcher(models())
