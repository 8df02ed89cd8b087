"""Request for a polynomial's value at one point, for HTTP and gRPC."""

from time import monotonic_ns

import numpy as np

from shmserve.config import Settings
from shmserve.dispatch.caller_shares import CallerShare
from shmserve.dispatch.inference_call import InferenceCall
from shmserve.dispatch.outcome import RunOptions
from shmserve.errors import InvalidArgument
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.frontends.inference import Inference
from shmserve.protocol.oip.model_signature import ModelSignature
from shmserve_polynomial.settings import PolynomialSettings


class OneNumber:
    """Request with one number, in the form that `Inference` needs."""

    nbytes = 4  # of the pool, for the input
    share: CallerShare | None = None  # the caller's share of the pool, once the request counts

    def __init__(self, x: float, largest: float) -> None:
        self.started_ns = monotonic_ns()
        self._x = x
        self._largest = largest

    def traceparent(self) -> str:
        return ""  # the client's trace (W3C Trace Context), if any

    def check(self, signature: ModelSignature) -> RunOptions:
        if signature.spec.backend != "polynomial":
            raise InvalidArgument(f"model '{signature.spec.name}' is no polynomial")
        if not abs(self._x) <= self._largest:
            raise InvalidArgument(f"x {self._x} is beyond {self._largest} (polynomial_largest)")
        return RunOptions()

    def fill(self, call: InferenceCall) -> None:
        slot = call.reserve(4)
        slot.view[:] = np.float32(self._x).tobytes()
        call.add_input("X", "FP32", (1,), slot)


def value(dispatcher: DispatchApi, settings: Settings, model: str, x: float) -> float:
    """Return a model's value at `x`. Raises errors for clients, from `shmserve.errors`."""
    own = settings.extension("polynomial", PolynomialSettings)
    entry = dispatcher.ready_model(model)
    with Inference(dispatcher, entry, OneNumber(x, own.largest)) as inference:
        outcome = inference.run()
        result = float(np.frombuffer(outcome.outputs[0].view, np.float32)[0])
        inference.answered()
        return result
