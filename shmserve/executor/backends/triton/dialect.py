"""Triton dialect of model.py: runs an unmodified class `TritonPythonModel`."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import UNSET

from shmserve.core.device_names import ordinal_of
from shmserve.errors import ConfigError, ModelFailure, ShmserveError
from shmserve.executor.backend import BatchForm, Context, Request, Response
from shmserve.executor.backends.config_merge import with_own_tensors
from shmserve.executor.backends.event_loop import Tasks
from shmserve.executor.backends.model_errors import from_exception, sanitised, without_frames
from shmserve.executor.backends.reshape import model_side
from shmserve.executor.backends.triton import other_models
from shmserve.executor.backends.triton.auto_complete import auto_completed
from shmserve.executor.backends.triton.exceptions import TritonError, to_code
from shmserve.executor.backends.triton.given_outputs import GivenOutputs
from shmserve.executor.backends.triton.inference_request import InferenceRequest
from shmserve.executor.backends.triton.inference_response import InferenceResponse
from shmserve.executor.backends.triton.response_sender import (
    InferenceResponseSender,
    SingleSink,
    StreamSink,
)
from shmserve.ids import instance_index
from shmserve.protocol.triton_config import backend_kinds, document, instance_groups
from shmserve.tensor.spec import ModelSpec

_log = logging.getLogger(__name__)


_FORCE_CPU = "FORCE_CPU_ONLY_INPUT_TENSORS"


class TritonDialect:
    batching = BatchForm.LISTED
    reads_on_device = False  # host inputs stay on the host, also for a model on a GPU

    def __init__(self, kind: type[Any]) -> None:
        self._kind = kind
        self._model: Any = None
        self._sinks: dict[int, SingleSink] = {}  # by `id(request)`; empty if decoupled
        self._tasks: Tasks | None = None  # created for the first coroutine

    def start(self, context: Context) -> ModelSpec:
        spec = context.spec
        if hasattr(self._kind, "auto_complete_config"):
            complete = self._kind.auto_complete_config
            spec = auto_completed(complete, spec, context.directory)
        else:
            spec = with_own_tensors(spec, context.directory)
        if not spec.outputs:
            raise ConfigError(
                f"model '{spec.name}': neither config.pbtxt nor auto_complete_config tells "
                "input and output"
            )
        document.require_complete(spec)
        execute = getattr(self._kind, "execute", None)
        if not callable(execute):
            raise ConfigError(f"model '{spec.name}': class TritonPythonModel has no execute")
        iterates = spec.config.is_iterative and spec.decoupled
        if iterates and inspect.iscoroutinefunction(execute):
            raise ConfigError(
                f"model '{spec.name}': sequence_batching.iterative_sequence does not go with "
                "an async execute of a decoupled model"
            )
        self._spec = spec
        self._check = GivenOutputs(model_side(spec))
        InferenceRequest.serve(spec)
        sequences = spec.config.sequence_batching
        self._keeps_states = sequences is not UNSET and bool(sequences.state)
        self._writable = spec.parameters.get("writable_inputs") == "true"
        self._device_inputs = _has_device_inputs(spec)
        other_models.serve(context.models, self._writable)
        arguments = _arguments(context, spec)
        self._instance = arguments["model_instance_name"]
        model = self._kind()
        if hasattr(model, "initialize"):
            model.initialize(arguments)
        self._model = model
        return spec

    def execute(self, requests: Sequence[Request]) -> Sequence[Response]:
        before = other_models.calling.set(requests)
        try:
            if self._spec.decoupled:
                self._stream(requests)
                return ()
            return self._answer(requests)
        finally:
            other_models.calling.reset(before)
            other_models.settle()

    def _answer(self, requests: Sequence[Request]) -> Sequence[Response]:
        self._sinks.clear()
        try:
            answers = self._run(requests)
        except BaseException as ex:
            error = without_frames(self._raised(ex))
            answers = [self._sent(request) or error for request in requests]
        else:
            answers = self._collected(requests, answers)
        return [
            self._again(request, answer) if request.rescheduled else self._response(request, answer)
            for request, answer in zip(requests, answers, strict=True)
        ]

    def _again(self, request: Request, answer: Any) -> Response:
        """Return the response to a rescheduled request: empty, or with states."""
        if answer is None:
            return Response()
        response = self._response(request, answer, partial=True)
        if response.error is not None or self._keeps_states:
            return response
        wrong = (
            "Expected a None object in the execute function return list for reschduled request, "
            f"found type '{type(answer)}'."
        )
        return Response(error=self._failure(wrong))

    def _run(self, requests: Sequence[Request]) -> Any:
        """Return the result of `execute`; if it is a coroutine, run the coroutine to its result."""
        result = self._model.execute(
            [self._received(request, self._single_sender) for request in requests]
        )
        if not asyncio.iscoroutine(result):
            return result

        def look() -> None:
            for request in requests:  # has the loop read messages, while this thread waits
                _ = request.cancelled

        return self._event_loop().wait_for(result, look)

    def _event_loop(self) -> Tasks:
        if self._tasks is None:
            self._tasks = Tasks()
        return self._tasks

    def _received(
        self, request: Request, open_sender: Callable[[Request], InferenceResponseSender]
    ) -> InferenceRequest:
        return InferenceRequest.received(request, open_sender, self._writable, self._device_inputs)

    # Models that send by themselves

    def _single_sender(self, request: Request) -> InferenceResponseSender:
        sink = self._sinks[id(request)] = SingleSink()
        return InferenceResponseSender(request, sink)

    def _sent(self, request: Request) -> InferenceResponse | None:
        """Return the response sent before `execute` failed, if any. The sender is closed."""
        sink = self._sinks.get(id(request))
        return sink.close() if sink is not None else None

    def _collected(self, requests: Sequence[Request], answers: Any) -> Sequence[Any]:
        """Return an answer for each request: the sent response, or else the returned response."""
        if answers is None and self._sinks:
            answers = [None] * len(requests)
        wrong = ""
        if not isinstance(answers, list | tuple):
            wrong = f"Expected a list in the execute return, found type '{type(answers)}'."
        elif len(answers) != len(requests):
            wrong = (
                "Number of InferenceResponse objects do not match the number of InferenceRequest "
                f"objects. InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) "
                f"size is:{len(answers)}"
            )
        if wrong:
            error = self._failure(wrong)
            return [self._sent(request) or error for request in requests]
        given: Sequence[Any] = answers
        if not self._sinks:
            return given
        return [self._chosen(*pair) for pair in zip(requests, given, strict=True)]

    def _chosen(self, request: Request, answer: Any) -> Any:
        sink = self._sinks.get(id(request))
        if sink is None:
            return answer
        if answer is None:
            waits = sink.has_response or not request.rescheduled
            return sink.wait(request) if waits else None
        chosen = sink.take(answer)
        if chosen is not answer:
            _log.warning(
                "execute returned a response to a request whose response had been sent already"
            )
        return chosen

    def _stream(self, requests: Sequence[Request]) -> None:
        sinks: list[StreamSink] = []

        def open_sender(request: Request) -> InferenceResponseSender:
            sinks.append(StreamSink(request, self._response))
            return InferenceResponseSender(request, sinks[-1])

        def fail(error: ShmserveError) -> None:
            for sink in sinks:
                sink.close()
            for request in requests:
                if request.responses is not None:
                    request.responses.fail(error)

        # Keep the requests until the end: a wrong result must be reported before they are freed.
        received = [self._received(request, open_sender) for request in requests]
        try:
            result = self._model.execute(received)
        except BaseException as ex:
            fail(self._raised(ex))
            return
        if asyncio.iscoroutine(result):
            self._event_loop().run(result, lambda ex: fail(self._raised(ex)))
        elif result is not None:
            fail(
                self._failure(
                    f"Python model '{self._instance}' is using the decoupled mode and the execute "
                    "function must return None."
                )
            )

    def close(self) -> None:
        model, self._model = self._model, None
        if model is not None and hasattr(model, "finalize"):
            model.finalize()
        if self._tasks is not None:
            self._tasks.close()

    def _response(self, request: Request, answer: Any, partial: bool = False) -> Response:
        if isinstance(answer, ShmserveError):
            return Response(error=answer)
        if not isinstance(answer, InferenceResponse):
            wrong = (
                "Expected an 'InferenceResponse' object in the execute function return list, "
                f"found type '{type(answer)}'."
            )
            return Response(error=self._failure(wrong))
        error = answer.error()
        if error is not None:
            return Response(error=_returned(error))
        pairs = ((tensor.name(), tensor.array()) for tensor in answer.output_tensors())
        try:
            outputs = self._check.answer(request.requested, pairs, partial)
        except ShmserveError as ex:
            return Response(error=ex)
        return Response(outputs=outputs, parameters=answer.plain_parameters)

    def _raised(self, ex: BaseException) -> ShmserveError:
        """Return the error for an exception of the model, in Triton's words."""
        error = from_exception(ex, _log, "execute failed")
        if not isinstance(error, ModelFailure):
            return error
        kind = type(ex).__name__
        named = error.message.startswith(kind)
        return self._failure(error.message if named else f"{kind}: {error.message}")

    def _failure(self, text: str) -> ModelFailure:
        return ModelFailure(
            f"Failed to process the request(s) for model '{self._instance}', message: {text}"
        )


def _returned(error: TritonError) -> ModelFailure:
    text = error.message()
    shown = sanitised(text)
    if shown != text:
        _log.error("a model returned an error: %s", text)
    return ModelFailure(shown or "the model returned an error", to_code(error.code()))


def _has_device_inputs(spec: ModelSpec) -> bool:
    """Return True if inputs stay in GPU memory."""
    force = spec.parameters.get(_FORCE_CPU, "yes")
    if force not in ("yes", "no"):
        raise ConfigError(
            f"model '{spec.name}': parameters.{_FORCE_CPU} '{force}' is neither 'yes' nor 'no'"
        )
    return force == "no"


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _arguments(context: Context, spec: ModelSpec) -> dict[str, str]:
    """Return the arguments of `initialize`; every value is text."""
    groups = instance_groups.read(spec.config)
    place = instance_groups.places(groups)[instance_index(context.instance)]
    kind = "MODEL" if place.group.kind == backend_kinds.MODEL else "CPU"
    number = ordinal_of(context.device)
    return {
        "model_config": spec.config.json().decode(),
        "model_instance_kind": kind if number is None else "GPU",
        "model_instance_name": f"{place.group.name}_{place.number}",
        "model_instance_device_id": str(number or 0),
        "model_repository": context.directory,
        "model_version": spec.version,
        "model_name": spec.name,
    }
