"""The native dialect of model.py: a class `Model` that reads views and writes into slots.

    class Model:
        def __init__(self, context):        # optional; context: shmserve.executor.backend.Context
            ...
        def infer(self, request):           # -> None or {"OUTPUT0": array, ...}
            x = request.input("INPUT0")                     # read-only view, no copy
            out = request.output("OUTPUT0", x.shape)        # writable, already in shared memory
            np.multiply(x, 2, out=out)
        def close(self):                    # optional
            ...

An output is either written into what `request.output` offered or returned in the dict;
a returned array is copied once (unless it is an input, or one that was offered).
`native_stream` says how decoupled models answer.

A worker that takes GRPS messages (parameter `grps` of config.pbtxt is "message") looks at
`request.grps`, or at `request.http` of a request to its own HTTP path, and returns a
`shmserve.grps.Message`, or what a custom HTTP request may be answered with.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from shmserve.errors import ConfigError, Internal
from shmserve.executor.backend import Context, Request, Response
from shmserve.executor.backends import native_messages
from shmserve.executor.backends.failure import from_exception
from shmserve.executor.backends.grps.http import HttpRequest
from shmserve.executor.backends.outputs import OutputCheck
from shmserve.executor.backends.reshape import model_side
from shmserve.executor.backends.untold import with_own_tensors
from shmserve.protocol import config_json, grps_spec
from shmserve.protocol.data_messages import Parameter
from shmserve.protocol.grps_message import GrpsMessage
from shmserve.tensor.dtypes import DATATYPES
from shmserve.tensor.spec import ModelSpec

_log = logging.getLogger(__name__)

_Stream = Callable[[Any, Request, OutputCheck], None]


class NativeRequest:
    """One request as `Model.infer` sees it. Valid until `infer` returns."""

    __slots__ = ("_check", "_offered", "_request")

    def __init__(self, request: Request, check: OutputCheck) -> None:
        self._request = request
        self._check = check
        self._offered: dict[str, np.ndarray[Any, Any]] = {}

    @property
    def id(self) -> str:
        """The client's request id, or ""."""
        return self._request.id

    @property
    def parameters(self) -> dict[str, Parameter]:
        """The request's parameters."""
        return self._request.parameters

    @property
    def requested(self) -> tuple[str, ...]:
        """Names of the outputs that somebody wants."""
        return self._request.requested

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more; long loops may look now and then."""
        return self._request.cancelled

    @property
    def grps(self) -> GrpsMessage | None:
        """The GRPS message of a worker that takes messages; None: the request has none.

        Its tensors and binary data are views of shared memory.
        """
        return native_messages.message_of(self._request)

    @property
    def streaming(self) -> bool:
        """Whether a GRPS client asked for a stream."""
        return bool(self._request.parameters.get(grps_spec.STREAMING))

    @property
    def http(self) -> HttpRequest | None:
        """A request to the worker's own HTTP path; None: it came another way."""
        return native_messages.http_of(self._request)

    @property
    def inputs(self) -> tuple[str, ...]:
        """Names of the inputs that were sent (optional ones may be missing)."""
        return tuple(self._request.inputs)

    def input(self, name: str) -> np.ndarray[Any, Any]:
        """An input as a read-only array; BYTES as an object array of `bytes`.

        Raises:
            Internal: the request has no such input.
        """
        found = self._request.inputs.get(name)
        if found is None:
            raise Internal(f"the request has no input '{name}'")
        return found.numpy()

    def answer(self, result: Any, partial: bool = False, first: bool = True) -> Response:
        """What the model gave, as a response (for the server, not for models).

        Raises:
            ShmserveError: it is nothing that can be sent.
        """
        if self._check.messages:
            return native_messages.response_of(self._request, result, self._check, first)
        offered, self._offered = self._offered, {}
        named = pairs(result, offered).items()
        return Response(outputs=self._check.answer(self._request.requested, named, partial))

    def output(self, name: str, shape: Sequence[int]) -> np.ndarray[Any, Any]:
        """A writable array, with undefined content, whose content is sent as the output.

        An output that nobody requested gets ordinary memory, so a model need not ask.

        Raises:
            Internal: no such output, a shape against the configuration, or a BYTES
                output (its size is not known before its content: return it instead).
            ArenaExhausted: there is no room for it now.
        """
        spec = self._check.spec(name)
        wanted = tuple(int(dim) for dim in shape)
        self._check.check_shape(spec, wanted)
        if spec.datatype == "BYTES":
            raise Internal(f"BYTES output '{name}' must be returned by infer")
        array = self._offered.get(name)
        if array is None:
            if name in self._request.requested:
                array = self._request.offer(name, spec.datatype, wanted)
            else:
                array = np.empty(wanted, DATATYPES[spec.datatype].numpy)
            self._offered[name] = array
        if array.shape != wanted:
            raise Internal(f"output '{name}' was asked for with two shapes")
        return array


class NativeDialect:
    """Runs a class `Model`."""

    def __init__(self, kind: type[Any]) -> None:
        self._kind = kind
        self._model: Any = None
        self._stream: _Stream | None = None  # runs one request of a decoupled model

    def start(self, context: Context) -> ModelSpec:
        spec = with_own_tensors(context.spec, context.directory)
        if not spec.inputs or not spec.outputs:
            raise ConfigError(f"model '{spec.name}': config.pbtxt must tell input and output")
        if not callable(getattr(self._kind, "infer", None)):
            raise ConfigError(f"model '{spec.name}': class Model has no method infer")
        config_json.require_complete(spec)
        self._check = OutputCheck(model_side(spec))
        if spec.decoupled:
            from shmserve.executor.backends.native_stream import stream

            self._stream = stream
        own_init = self._kind.__init__ is not object.__init__
        self._model = self._kind(context) if own_init else self._kind()
        return spec

    def execute(self, requests: Sequence[Request]) -> Sequence[Response]:
        if self._stream is not None:
            for request in requests:
                self._run_stream(self._stream, request)
            return ()
        return [self._one(request) for request in requests]

    def close(self) -> None:
        model, self._model = self._model, None
        if model is not None and hasattr(model, "close"):
            model.close()

    def _one(self, request: Request) -> Response:
        view = NativeRequest(request, self._check)
        try:
            result = self._model.infer(view)
            return view.answer(result)
        except (Exception, SystemExit) as ex:
            return Response(error=from_exception(ex, _log, "infer failed"))

    def _run_stream(self, stream: _Stream, request: Request) -> None:
        assert request.responses is not None
        try:
            stream(self._model, request, self._check)
        except (Exception, SystemExit) as ex:
            request.responses.fail(from_exception(ex, _log, "infer failed"))


def pairs(result: Any, offered: dict[str, np.ndarray[Any, Any]]) -> dict[str, Any]:
    """All outputs by name: those that were offered, and those that were given.

    Raises:
        Internal: neither None nor a dict, or an output in both.
    """
    if result is None:
        return offered
    if not isinstance(result, dict):
        raise Internal(f"infer must return None or a dict, got {type(result).__name__}")
    for name, array in result.items():
        if name in offered and array is not offered[name]:
            raise Internal(f"output '{name}' was both offered and returned")
    return {**offered, **result}
