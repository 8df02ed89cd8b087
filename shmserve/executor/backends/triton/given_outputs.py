"""Given outputs: a Triton model's outputs, sent even if they contradict the configuration.

Triton passes on a Python model's tensors without a check against the configuration, and models
rely on this. So a wrong datatype or shape is logged once for each output, and the client gets the
tensor with its true datatype and shape.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from shmserve.errors import Internal
from shmserve.executor.backend import Output
from shmserve.executor.backends.triton.data_types import as_strings
from shmserve.executor.backends.triton.exceptions import TritonModelException
from shmserve.tensor.dtypes import from_numpy
from shmserve.tensor.spec import ModelSpec, fits

_log = logging.getLogger(__name__)


class GivenOutputs:
    """Makes `Output`s of a model's tensors, which are numpy or CuPy arrays."""

    def __init__(self, spec: ModelSpec) -> None:
        self._model = spec.name
        self._specs = {output.name: output for output in spec.outputs}
        self._warned: set[str] = set()

    def answer(
        self, requested: tuple[str, ...], pairs: Iterable[tuple[str, Any]], partial: bool = False
    ) -> tuple[Output, ...]:
        """Return the requested outputs in the request's order, without outputs that the model did
        not give. Missing outputs are logged, unless `partial` is True, as for the answers of a
        stream.

        Raises:
            Internal: an output is given twice, or a string cannot be sent.
        """
        outputs: dict[str, Output] = {}
        for name, array in pairs:
            if name in outputs:
                raise Internal(f"model '{self._model}' gave output '{name}' twice")
            if name in requested:
                outputs[name] = self._output(name, array)
        if len(outputs) < len(requested) and not partial:
            absent = next(name for name in requested if name not in outputs)
            self._warn_once(absent, "was requested and not given")
        return tuple(outputs[name] for name in requested if name in outputs)

    def _output(self, name: str, array: Any) -> Output:
        kind = from_numpy(array.dtype)
        assert kind is not None  # checked by Tensor
        if kind.name == "BYTES":
            try:
                array = as_strings(array)
            except TritonModelException as ex:
                raise Internal(f"model '{self._model}': output '{name}': {ex}") from None
        spec = self._specs.get(name)
        if spec is not None and name not in self._warned:
            if kind.name != spec.datatype:
                self._warn_once(name, f"is {kind.name}, but {spec.datatype} in the configuration")
            elif not fits(spec.shape, array.shape):
                wanted, got = list(spec.shape), list(array.shape)
                self._warn_once(name, f"has shape {got}, but {wanted} in the configuration")
        return Output(name, kind.name, array)

    def _warn_once(self, name: str, what: str) -> None:
        if name not in self._warned:
            self._warned.add(name)
            _log.warning("model '%s': output '%s' %s", self._model, name, what)
