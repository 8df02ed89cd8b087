"""The Triton dialect of model.py: a class `TritonPythonModel`, unmodified."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

from shmserve.core.devices import ordinal_of
from shmserve.errors import ConfigError, Internal, ModelFailure, ShmserveError
from shmserve.executor.backend import BatchForm, Context, Request, Response
from shmserve.executor.backends.config_merge import with_own_tensors
from shmserve.executor.backends.event_loop import Tasks
from shmserve.executor.backends.model_errors import from_exception, sanitised, without_frames
from shmserve.executor.backends.reshape import model_side
from shmserve.executor.backends.triton import other_models
from shmserve.executor.backends.triton.auto_complete import AutoCompleteConfig
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
from shmserve.protocol.triton_config import (
    backend_kinds,
    document,
    instance_groups,
    model_config,
)
from shmserve.repository import read_labels
from shmserve.tensor.spec import ModelSpec

_log = logging.getLogger(__name__)


_FORCE_CPU = "FORCE_CPU_ONLY_INPUT_TENSORS"


class TritonDialect:
    """Runs a class `TritonPythonModel`."""

    batching = BatchForm.LISTED
    reads_on_device = False  # inputs from host memory are host tensors, also on a GPU

    def __init__(self, kind: type[Any]) -> None:
        self._kind = kind
        self._model: Any = None
        self._sinks: dict[int, SingleSink] = {}  # of an ordinary model, by request
        self._tasks: Tasks | None = None  # of a model whose execute is `async`

    def start(self, context: Context) -> ModelSpec:
        spec = context.spec
        if hasattr(self._kind, "auto_complete_config"):
            spec = _auto_completed(self._kind, spec, context.directory)
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
        if inspect.iscoroutinefunction(execute):
            if spec.config.is_iterative and spec.decoupled:
                raise ConfigError(
                    f"model '{spec.name}': sequence_batching.iterative_sequence does not go with "
                    "an async execute of a decoupled model"
                )
            self._tasks = Tasks()
        self._spec = spec
        self._check = GivenOutputs(model_side(spec))
        InferenceRequest.served = (spec.name, int(spec.version))
        InferenceRequest.iterative = spec.config.is_iterative
        self._writable = spec.parameters.get("writable_inputs") == "true"
        self._device_inputs = _has_device_inputs(spec)
        other_models.serve(context.models, self._writable)
        arguments = _arguments(context, spec)
        instance = arguments["model_instance_name"]
        self._failed = (
            f"Failed to process the request(s) for model instance '{instance}', message: "
        )
        self._not_none = (
            f"Python model '{instance}' is using the decoupled mode and the execute function must"
            " return None."
        )
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
            answers = self._model.execute(
                [self._received(request, self._single_sender) for request in requests]
            )
            if self._tasks is not None:
                answers = self._tasks.wait_for(answers)
        except (Exception, SystemExit) as ex:
            error = without_frames(from_exception(ex, _log, "execute failed"))
            if isinstance(error, ModelFailure):
                error = self._failure(error.message)
            return [Response(error=error) for _ in requests]
        if self._sinks:
            answers = self._collected(requests, answers)
        wrong = ""
        if not isinstance(answers, list | tuple):
            wrong = f"Expected a list in the execute return, got {_kind(answers)}"
        elif len(answers) != len(requests):
            wrong = (
                f"execute must return one response for each request: {len(answers)} for "
                f"{len(requests)}"
            )
        if wrong:
            return [Response(error=self._failure(wrong)) for _ in requests]
        return [
            Response()
            if request.rescheduled and answer is None
            else self._response(request, answer, request.rescheduled)
            for request, answer in zip(requests, answers, strict=True)
        ]

    def _received(
        self, request: Request, open_sender: Callable[[Request], InferenceResponseSender]
    ) -> InferenceRequest:
        return InferenceRequest.received(request, open_sender, self._writable, self._device_inputs)

    # Models that send by themselves

    def _single_sender(self, request: Request) -> InferenceResponseSender:
        sink = self._sinks[id(request)] = SingleSink()
        return InferenceResponseSender.to(request, sink)

    def _collected(self, requests: Sequence[Request], answers: Any) -> Any:
        """What was sent in the place of each None that was returned."""
        given = [None] * len(requests) if answers is None else answers
        if not isinstance(given, list | tuple) or len(given) != len(requests):
            return answers
        collected = []
        for request, answer in zip(requests, given, strict=True):
            sink = self._sinks.get(id(request))
            sent = sink is not None and sink.has_response
            waits = answer is None and (sent or not request.rescheduled)
            collected.append(sink.wait(request) if waits and sink else answer)
        return collected

    def _stream_sender(self, request: Request) -> InferenceResponseSender:
        return InferenceResponseSender.to(request, StreamSink(request, self._response))

    def _stream(self, requests: Sequence[Request]) -> None:
        # Ours until the end: what is wrong with the result must be told before its requests go.
        given = [self._received(request, self._stream_sender) for request in requests]
        try:
            result = self._model.execute(given)
        except (Exception, SystemExit) as ex:
            _fail(requests, from_exception(ex, _log, "execute failed"))
            return
        if self._tasks is not None:
            self._tasks.run(result, lambda error: _fail(requests, error))
        elif result is not None:
            _log.error("execute of a decoupled model returned %s, not None", _kind(result))
            _fail(requests, Internal(self._not_none))

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
                f"got {_kind(answer)}"
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

    def _failure(self, text: str) -> ModelFailure:
        return ModelFailure(self._failed + text)


def _fail(requests: Sequence[Request], error: ShmserveError) -> None:
    for request in requests:
        if request.responses is not None:
            request.responses.fail(error)


def _returned(error: TritonError) -> ModelFailure:
    text = error.message()
    shown = sanitised(text)
    if shown != text:
        _log.error("a model returned an error: %s", text)
    return ModelFailure(shown or "the model returned an error", to_code(error.code()))


def _has_device_inputs(spec: ModelSpec) -> bool:
    """Whether inputs that lie in a GPU's memory stay there."""
    force = spec.parameters.get(_FORCE_CPU, "yes")
    if force not in ("yes", "no"):
        raise ConfigError(
            f"model '{spec.name}': parameters.{_FORCE_CPU} '{force}' is neither 'yes' nor 'no'"
        )
    return force == "no"


def _kind(value: Any) -> str:
    return "None" if value is None else type(value).__name__


def _arguments(context: Context, spec: ModelSpec) -> dict[str, str]:
    """What `initialize` gets; every value is text."""
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


def _auto_completed(kind: type[Any], spec: ModelSpec, directory: str) -> ModelSpec:
    """The spec after the model's own `auto_complete_config`, checked like a configuration."""
    config = AutoCompleteConfig(spec.config)
    result = kind.auto_complete_config(config)
    if not isinstance(result, AutoCompleteConfig):
        raise ConfigError(
            f"model '{spec.name}': auto_complete_config must return the configuration it got, "
            f"got {_kind(result)}"
        )
    complete = model_config.parse_dict(result.as_dict(), spec.name, spec.backend, partial=False)
    return complete.spec(spec.version, read_labels(complete, directory))
