"""Calls to other models in Triton's dialect: what stands behind `InferenceRequest.exec`,
`async_exec` and the functions of `pb_utils` that ask for, load and unload models."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from shmserve.errors import ShmserveError, from_code
from shmserve.executor.backend import Request
from shmserve.executor.backends.triton.called_request import CalledRequest
from shmserve.executor.backends.triton.exceptions import TritonError, TritonModelException, of_code
from shmserve.executor.backends.triton.inference_response import InferenceResponse
from shmserve.executor.backends.triton.tensor import Tensor
from shmserve.executor.calling import (
    NO_MODELS,
    CallAnswer,
    CallingRequest,
    OtherModels,
    RunningCall,
)

_LOOK_S = 0.5  # how often an awaiting coroutine looks whether its calling requests are cancelled

# What `execute` works on; coroutines it starts have it, threads it starts have not.
calling: ContextVar[Sequence[Request]] = ContextVar("calling", default=())


class _Served:
    """What this executor's model calls; an executor runs one model."""

    models: OtherModels = NO_MODELS
    writable = False  # the model wants tensors of its own


def serve(models: OtherModels, writable: bool) -> None:
    """Told once when the model is loaded (for the server, not for models)."""
    _Served.models, _Served.writable = models, writable


def settle() -> None:
    """The calling requests are over (for the server, not for models)."""
    _Served.models.settle()


# ------------------------------------------------------------------------- inference


def execute(request: CalledRequest, decoupled: bool) -> InferenceResponse | ResponseIterator:
    """The answer, an error as one, too; with `decoupled` all of them."""
    if decoupled:
        return ResponseIterator(_Answers(request, decoupled))
    response = _Answers(request, decoupled).next()
    assert response is not None
    return response


async def execute_async(
    request: CalledRequest, decoupled: bool
) -> InferenceResponse | ResponseIterator:
    """As `execute`, with `decoupled` once the first answer is there; whoever else runs in the event
    loop goes on meanwhile."""
    answers = _Answers(request, decoupled)
    response = await answers.next_async()
    if decoupled:
        return ResponseIterator(answers, response)
    assert response is not None
    return response


class _Answers:
    """A call's answers as responses. One that cannot be made, or that fails, has one error."""

    def __init__(self, request: CalledRequest, decoupled: bool) -> None:
        self._running: RunningCall | None = None
        self._failed: ShmserveError | None = None
        try:
            self._running = _Served.models.begin(request.call(decoupled), _calling())
        except ShmserveError as ex:
            self._failed = _told(request, ex)

    def next(self) -> InferenceResponse | None:
        """None: there are no more."""
        if self._running is None:
            return self._error()
        try:
            return _response(self._running.next())
        except ShmserveError as ex:
            self._running, self._failed = None, ex
            return self._error()

    async def next_async(self) -> InferenceResponse | None:
        if self._running is None:
            return self._error()
        try:
            return _response(await _awaited(self._running))
        except ShmserveError as ex:
            self._running, self._failed = None, ex
            return self._error()

    def cancel(self) -> None:
        if self._running is not None:
            self._running.cancel()

    def _error(self) -> InferenceResponse | None:
        failed, self._failed = self._failed, None
        if failed is None:
            return None
        return InferenceResponse(error=TritonError(failed.message, of_code(failed.code)))

    def __del__(self) -> None:
        if self._running is not None:
            self._running.abandoned()


class ResponseIterator:
    """The responses to a call with `decoupled`, for `for` and, of coroutines, also `async for`.

    It ends after the final one, which has no outputs where it only ends the stream. Whoever loops
    waits for what has not come, with `for` the event loop, too; who is slow holds back the called
    model.
    """

    def __init__(self, answers: _Answers, first: InferenceResponse | None = None) -> None:
        self._answers = answers
        self._first = first  # if it has been waited for

    def __iter__(self) -> ResponseIterator:
        return self

    def __next__(self) -> InferenceResponse:
        response = self._take_first() or self._answers.next()
        if response is None:
            raise StopIteration
        return response

    def __aiter__(self) -> ResponseIterator:
        return self

    async def __anext__(self) -> InferenceResponse:
        response = self._take_first() or await self._answers.next_async()
        if response is None:
            raise StopAsyncIteration
        return response

    def _take_first(self) -> InferenceResponse | None:
        first, self._first = self._first, None
        return first

    def cancel(self) -> None:
        """Nobody wants further responses: the next one has the error CANCELLED."""
        self._answers.cancel()


async def _awaited(running: RunningCall) -> CallAnswer | None:
    future = asyncio.wrap_future(running.next_soon())
    try:
        while not (await asyncio.wait({future}, timeout=_LOOK_S))[0]:
            if not running.wanted:
                running.cancel()
        return future.result()
    except asyncio.CancelledError:
        running.cancel()
        future.cancel()
        raise
    finally:
        del future  # which has the exception, whose traceback would have it


def _told(request: CalledRequest, error: ShmserveError) -> ShmserveError:
    """Why a call could not be made; that the model is not there or not ready in Triton's words."""
    if not error.message.startswith("Request for unknown model"):
        return error
    return from_code(
        error.code,
        f"Failed for execute the inference request. Model '{request.model_name}' is not ready.",
    )


def _calling() -> Sequence[CallingRequest]:
    return calling.get()


def _response(answer: CallAnswer | None) -> InferenceResponse | None:
    if answer is None:
        return None
    arrays = ((t.name, t.array.copy() if _Served.writable else t.array) for t in answer.outputs)
    error = answer.error
    return InferenceResponse.called(
        [Tensor(name, array) for name, array in arrays],
        None if error is None else TritonError(error.message, of_code(error.code)),
        answer.parameters,
    )


# ---------------------------------------------------------------------------- models


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    """Whether a model, or this version of it, can be called."""
    return _Served.models.is_ready(model_name, str(model_version))


def load_model(
    model_name: str, config: str | None = None, files: Mapping[str, Any] | None = None
) -> None:
    """Load a model, or load it again, and wait until it serves; as a client's request to load it,
    for `model_control` explicit.

    Args:
        model_name: a model of the repository, or any name if `files` are given.
        config: a configuration as JSON in place of its own.
        files: ``file:<path>`` -> content; the model is made of nothing else, and has a `config`.

    Raises:
        TritonModelException: it was refused, or the model cannot be loaded.
    """
    parameters = dict(files or {})
    if config:
        parameters["config"] = config
    try:
        _Served.models.load(model_name, parameters)
    except ShmserveError as ex:
        raise TritonModelException(ex.message) from None


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Serve a model no more; with `unload_dependents` nor what was loaded as steps of it alone.

    Raises:
        TritonModelException: it was refused.
    """
    try:
        _Served.models.unload(model_name, unload_dependents)
    except ShmserveError as ex:
        raise TritonModelException(ex.message) from None
