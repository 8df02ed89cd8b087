"""The conformance models as plain functions, for tests without executors."""

from typing import Any

import numpy as np

from shmserve.dispatch.outcome import Outcome, OutputTensor
from shmserve.errors import Code, ModelFailure
from shmserve.protocol.triton_config import document
from shmserve.tensor.config_document import ConfigDocument, TransactionEntry
from shmserve.tensor.dtypes import DATATYPES
from shmserve.tensor.spec import ModelSpec, TensorSpec
from tests.fake_dispatch import FakeDispatcher, FakeRequest, Model


def array_of(tensor: OutputTensor) -> np.ndarray[Any, Any]:
    return np.frombuffer(tensor.view, DATATYPES[tensor.datatype].numpy).reshape(tensor.shape)


def tensor_of(name: str, datatype: str, array: np.ndarray[Any, Any]) -> OutputTensor:
    view = memoryview(array.tobytes()).toreadonly()
    return OutputTensor(name, datatype, tuple(array.shape), view)


def identity(request: FakeRequest) -> Outcome:
    given = request.inputs["INPUT0"]
    return Outcome((OutputTensor("OUTPUT0", given.datatype, given.shape, given.view),))


def add_sub(request: FakeRequest) -> Outcome:
    datatype = request.inputs["INPUT0"].datatype
    a, b = array_of(request.inputs["INPUT0"]), array_of(request.inputs["INPUT1"])
    results = {"OUTPUT0": a + b, "OUTPUT1": a - b}
    requested = request.requested or tuple(results)
    return Outcome(tuple(tensor_of(name, datatype, results[name]) for name in requested))


def failing(request: FakeRequest) -> Outcome:
    values = array_of(request.inputs["INPUT0"])
    first = values[0] if values.size else 0
    if first == 1:
        raise ModelFailure("ValueError: boom raised")
    if first == 2:
        raise ModelFailure("boom returned", Code.INVALID_ARGUMENT)
    if first == 3:
        return Outcome()
    if first == 5:
        raise RuntimeError("a secret of /the/server")
    if first == 6:
        raise MemoryError
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
    policy = TransactionEntry(decoupled)
    config = ConfigDocument(name, backend="python", model_transaction_policy=policy)
    bare = ModelSpec(
        name,
        "1",
        "python",
        "python",
        max_batch,
        tuple(TensorSpec(f"INPUT{i}", datatype, shape) for i in range(inputs)),
        tuple(TensorSpec(f"OUTPUT{i}", datatype, shape, labels=labels) for i in range(outputs)),
        decoupled,
        config=config,
    )
    return document.completed(bare)


def models() -> list[Model]:
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
