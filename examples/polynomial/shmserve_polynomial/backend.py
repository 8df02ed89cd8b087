"""Backend for polynomials, which computes in the executor's output slots."""

import os
from collections.abc import Sequence

import msgspec
import numpy as np

from shmserve.errors import ConfigError
from shmserve.executor.backend import CPU, BatchForm, Context, Output, Request, Response
from shmserve.tensor.spec import ModelSpec


class PolynomialBackend:
    """Backend of one model instance."""

    chooses_device = True  # always the CPU, whatever device the instance was given
    device = CPU
    reads_on_device = False
    batching = BatchForm.ALONE

    def load(self, context: Context) -> ModelSpec:
        path = os.path.join(context.directory, context.spec.version, context.spec.config.model_file)
        try:
            with open(path, "rb") as file:
                self._coefficients = msgspec.json.decode(file.read(), type=list[float])
        except msgspec.DecodeError as ex:
            raise ConfigError(f"model '{context.spec.name}': coefficients: {ex}") from None
        return context.spec

    def execute(self, requests: Sequence[Request]) -> Sequence[Response]:
        return [self._answer(request) for request in requests]

    def close(self) -> None:
        pass

    def _answer(self, request: Request) -> Response:
        x = request.inputs["X"].numpy()  # a view of the frontend's memory
        # a view of this process's memory, which the frontend sends from
        y = request.offer("Y", "FP32", x.shape)
        y.fill(0)
        for coefficient in self._coefficients:
            np.multiply(y, x, out=y)
            np.add(y, np.float32(coefficient), out=y)
        return Response(outputs=(Output("Y", "FP32", y),))
