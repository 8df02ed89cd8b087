"""Fake models for tests of the GRPS frontends."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from shmserve.core.registry import ModelState
from shmserve.dispatch.outcome import Outcome, OutputTensor
from shmserve.errors import ModelFailure
from shmserve.grps.protocol import custom_http, message_wire, model_parameters
from shmserve.grps.protocol.custom_http import HttpAnswer
from shmserve.grps.protocol.grps_message import GrpsMessage
from shmserve.tensor import bytes_codec
from shmserve.tensor.dtypes import DATATYPES
from shmserve.tensor.spec import ModelSpec, TensorSpec
from tests.fake_dispatch import FakeDispatcher, FakeRequest

Tensors = Sequence[tuple[str, str, tuple[int, ...]]]


def spec(
    name: str, inputs: Tensors = (), outputs: Tensors = (), batch: int = 0, **parameters: str
) -> ModelSpec:
    """Return a model's spec; a spec with the parameter grps = message is completed as at the
    start."""
    decoupled = parameters.pop("decoupled", "") == "true"
    found = ModelSpec(
        name,
        "1",
        "python",
        "python",
        batch,
        tuple(TensorSpec(*item) for item in inputs),
        tuple(TensorSpec(*item) for item in outputs),
        decoupled=decoupled,
        parameters=parameters,
    )
    return model_parameters.completed(found)


def message_spec(name: str = "your_model", **parameters: str) -> ModelSpec:
    """Return the spec of a model that takes the message."""
    told: dict[str, Any] = {"grps": "message", "grps_version": "1.0.0", **parameters}
    return spec(name, **told)


def arrays(inputs: dict[str, bytes]) -> dict[str, Any]:
    return {name: np.frombuffer(data, np.uint8) for name, data in inputs.items()}


def echo(request: FakeRequest) -> Outcome:
    """Every input as the output of the same name, or OUT for IN."""
    return Outcome(
        tuple(
            OutputTensor(t.name.replace("IN", "OUT"), t.datatype, t.shape, t.view)
            for t in request.inputs.values()
        )
    )


def answering(**arrays: Any) -> Callable[[FakeRequest], Outcome]:
    """Return a model that always gives these arrays."""

    def run(request: FakeRequest) -> Outcome:
        return Outcome(tuple(tensor(name, value) for name, value in arrays.items()))

    return run


def tensor(name: str, value: Any, datatype: str = "") -> OutputTensor:
    array = np.asarray(value)
    if not datatype and array.dtype.kind in "OSU":
        elements = [e if isinstance(e, bytes) else str(e).encode() for e in array.ravel().tolist()]
        return OutputTensor(name, "BYTES", array.shape, memoryview(bytes_codec.encode(elements)))
    kind = datatype or next(d.name for d in DATATYPES.values() if d.numpy == array.dtype)
    return OutputTensor(name, kind, array.shape, memoryview(array.tobytes()))


def message(value: GrpsMessage) -> Outcome:
    """Return the answer of a model that takes messages."""
    data = message_wire.encode(value)
    return Outcome((OutputTensor("grps", "UINT8", (len(data),), memoryview(data)),))


def streaming(request: FakeRequest) -> Iterator[Outcome]:
    """Text in two pieces and bytes in a third, or one answer if no stream was asked for."""
    if not request.parameters[model_parameters.STREAMING]:
        yield message(GrpsMessage(str_data="one answer"))
        return
    yield message(GrpsMessage(str_data="stream data 1"))
    yield message(GrpsMessage(str_data="stream data 2"))
    yield message(GrpsMessage(bin_data=b"\xff\x00"))


def breaking(request: FakeRequest) -> Iterator[Outcome]:
    """Fail after the first answer."""
    yield message(GrpsMessage(str_data="first"))
    yield Outcome(error=ModelFailure("the model broke"))


def refusing(request: FakeRequest) -> Outcome:
    raise ModelFailure("the model said no")


def http_echo(request: FakeRequest) -> Iterator[Outcome]:
    """Answer an HTTP request with a description of the request."""
    head = custom_http.decode_request(request.inputs["http"].view)
    body = bytes(request.inputs["http_body"].view) if "http_body" in request.inputs else b""
    answer = HttpAnswer(201, (("Content-Type", "text/html"), ("X-Query", repr(head.query))))
    parts = [head.method.encode() + b" " + body]
    if request.parameters[model_parameters.STREAMING]:
        parts = [b"data: 1\n\n", b"data: 2\n\n"]
        answer = HttpAnswer(200, (("Content-Type", "text/event-stream"),))
    for index, part in enumerate(parts):
        data = custom_http.encode(answer)
        outputs = [OutputTensor("http_body", "UINT8", (len(part),), memoryview(part))]
        if not index:
            outputs.insert(0, OutputTensor("http", "UINT8", (len(data),), memoryview(data)))
        yield Outcome(tuple(outputs))


def dispatcher(*models: tuple[ModelSpec, Any]) -> FakeDispatcher:
    """Return a dispatcher of ready models."""
    return FakeDispatcher(models)


def unready(fake: FakeDispatcher, name: str) -> None:
    fake.put(fake.entries[name]["1"].spec, ModelState.UNAVAILABLE)
