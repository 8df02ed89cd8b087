"""Calls to other models in Triton's dialect: implements `InferenceRequest.exec` and `async_exec`,
and the functions of `pb_utils` that query, load and unload models."""

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
    OtherModels,
    RunningCall,
)

_LOOK_S = 0.5  # interval at which a coroutine checks for cancelled calling requests

# Requests that `execute` works on. Coroutines started by `execute` inherit the value, threads do
# not.
calling: ContextVar[Sequence[Request]] = ContextVar("calling", default=())


class _Served:
    """State of this executor's only model."""

    models: OtherModels = NO_MODELS
    writable = False  # True: copy outputs, so that the model may write


def serve(models: OtherModels, writable: bool) -> None:
    """Set the callable models, once when the model is loaded (for the server, not for models)."""
    _Served.models, _Served.writable = models, writable


def settle() -> None:
    """Give back outputs of called models whose arrays have been collected (for the server, not for
    models)."""
    _Served.models.settle()


# ------------------------------------------------------------------------- inference


def execute(request: CalledRequest, decoupled: bool) -> InferenceResponse | ResponseIterator:
    """Return the answer of the called model; with `decoupled`, an iterator over all answers.
    Errors are returned as responses."""
    if decoupled:
        return ResponseIterator(_Answers(request, decoupled))
    response = _Answers(request, decoupled).next()
    assert response is not None
    return response


async def execute_async(
    request: CalledRequest, decoupled: bool
) -> InferenceResponse | ResponseIterator:
    """Return the answer as `execute` does, without blocking the event loop. With `decoupled`,
    return once the first answer has come."""
    answers = _Answers(request, decoupled)
    response = await answers.next_async()
    if decoupled:
        return ResponseIterator(answers, response)
    assert response is not None
    return response


class _Answers:
    """Answers of a call, as responses. If the call cannot be made or fails, the last response has
    the error."""

    def __init__(self, request: CalledRequest, decoupled: bool) -> None:
        self._running: RunningCall | None = None
        self._failed: ShmserveError | None = None
        try:
            self._running = _Served.models.begin(request.call(decoupled), calling.get())
        except ShmserveError as ex:
            self._failed = _in_triton_words(request, ex)

    def next(self) -> InferenceResponse | None:
        """Return the next response, or None after the last response."""
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
    """Responses of a call with `decoupled`, for `for` and, in coroutines, also for `async for`.

    The iterator ends after the final response, which may have no outputs. A `for` loop blocks
    until the next response, and blocks the event loop, too. A slow reader holds back the called
    model.
    """

    def __init__(self, answers: _Answers, first: InferenceResponse | None = None) -> None:
        self._answers = answers
        self._first = first  # set if awaited already

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
        """Cancel the call: a response with the error CANCELLED follows the received responses."""
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
        del future  # breaks the cycle of future, exception and traceback


def _in_triton_words(request: CalledRequest, error: ShmserveError) -> ShmserveError:
    """Return the error of a failed call. If the model is missing or not ready, the text has the
    words of Triton's inference API and of Triton's tests of `exec`."""
    if not error.message.startswith("Request for unknown model"):
        return error
    return from_code(
        error.code,
        f"{error.message}. Failed for execute the inference request. Model"
        f" '{request.model_name}' is not ready.",
    )


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
    """Return True if a model can be called, in the given version or in any."""
    return _Served.models.is_ready(model_name, str(model_version))


def load_model(
    model_name: str, config: str | None = None, files: Mapping[str, Any] | None = None
) -> None:
    """Load or reload a model, and wait until it serves. Same as a client's load request; needs
    `model_control` explicit.

    Args:
        model_name: a model of the repository, or any name if `files` are given.
        config: JSON configuration in place of the model's own.
        files: ``file:<path>`` -> content. The model consists of these files alone, and needs
            `config`.

    Raises:
        TritonModelException: the request was refused, or the model cannot be loaded.
    """
    parameters = dict(files or {})
    if config:
        parameters["config"] = config
    try:
        _Served.models.load(model_name, parameters)
    except ShmserveError as ex:
        raise TritonModelException(ex.message) from None


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    """Stop serving a model. With `unload_dependents`, also stop models that were loaded only as
    its steps.

    Raises:
        TritonModelException: the request was refused.
    """
    try:
        _Served.models.unload(model_name, unload_dependents)
    except ShmserveError as ex:
        raise TritonModelException(ex.message) from None
