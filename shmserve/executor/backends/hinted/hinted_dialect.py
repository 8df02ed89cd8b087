"""Hinted dialect of model.py: a function, or a class with a method `predict`, whose type hints are
the model's configuration.

    Rows = Annotated[NDArray[np.float32], Shape("batch", 3)]

    class Scaled:
        def __init__(self, context):        # optional, as in the native dialect
            ...
        def predict(self, rows: Rows) -> Rows:
            return rows * 2

The hints complete the model's config.pbtxt, which may be missing. Then the native dialect runs an
adapter around the function, so that batching, devices, streams and calls to other models are those
of the native dialect.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from shmserve.errors import ConfigError, Internal, InvalidArgument, ShmserveError
from shmserve.executor.backend import BatchForm, Context, Request, Response
from shmserve.executor.backends.hinted.array_hints import ArrayCall, has_array
from shmserve.executor.backends.hinted.json_hints import JsonCall, summary_of
from shmserve.executor.backends.hinted.signatures import METHOD, HintedSignature, signature_of
from shmserve.executor.backends.model_errors import from_exception, without_frames
from shmserve.executor.backends.native.dialect import NativeDialect, NativeRequest
from shmserve.executor.backends.native.stream_dialect import NativeStreamDialect
from shmserve.executor.backends.triton.auto_complete import AutoCompleteConfig, auto_completed
from shmserve.tensor.spec import ModelSpec

_log = logging.getLogger(__name__)

_BEGINNINGS = ("setup", "load")  # of LitServe and others
_HINTS = "the code's type hints"  # source of the configuration, in messages


class HintedCall(Protocol):
    """Way between a request's tensors and a function's arguments and answer."""

    def complete(self, config: AutoCompleteConfig) -> AutoCompleteConfig: ...
    def arguments(self, request: Any) -> dict[str, Any]: ...
    def answer(self, result: Any) -> dict[str, Any]: ...


class HintedFunction(Struct, frozen=True):
    """A function or class with its signature, and the way to call the function."""

    target: Callable[..., Any]
    signature: HintedSignature
    call: HintedCall


class HintedModel:
    """Adapter: a class `Model` of the native dialect around a function, or around an instance of a
    class with a method `predict`."""

    served: HintedFunction  # set in subclasses, one for each model

    def __init__(self, context: Context) -> None:
        target = self.served.target
        self._instance: Any = None
        self._predict = target
        if isinstance(target, type):
            takes_context = "context" in inspect.signature(target).parameters
            self._instance = target(context=context) if takes_context else target()
            self._predict = getattr(self._instance, METHOD)

    def infer(self, request: Any) -> Any:
        return self.served.call.answer(self._called(request))

    infer_batch = infer

    def close(self) -> None:
        if hasattr(self._instance, "close"):
            self._instance.close()

    def _called(self, request: Any) -> Any:
        arguments = self.served.call.arguments(request)
        if name := self.served.signature.request:
            arguments[name] = request
        return self._predict(**arguments)


class HintedBatch(HintedModel):
    """Adapter around a function on plain values whose arguments are lists, with an element for each
    caller."""

    def infer_all(self, requests: Sequence[Any]) -> list[Any]:
        """Return the outputs of each request, or the error of a request that does not fit."""
        call = self.served.call
        results: list[Any] = []
        for request in requests:
            try:
                results.append(call.arguments(request))
            except BaseException as ex:  # of the hints' own code as well, such as `__post_init__`
                results.append(without_frames(from_exception(ex, _log, "infer failed")))
        places = [n for n, result in enumerate(results) if isinstance(result, dict)]
        try:
            self._answer(results, places)
        except InvalidArgument:
            if len(places) == 1:
                raise
            for place in places:  # one by one, so that the request at fault fails alone
                try:
                    self._answer(results, [place])
                except BaseException as ex:
                    results[place] = without_frames(from_exception(ex, _log, "infer failed"))
        return results

    def _answer(self, results: list[Any], places: list[int]) -> None:
        """Put outputs, or an error, in the place of the arguments."""
        if not places:
            return
        call = self.served.call
        joined = {
            a.name: [results[place].get(a.name, a.default) for place in places]
            for a in self.served.signature.arguments
        }
        answers = self._predict(**joined)
        if not isinstance(answers, list) or len(answers) != len(places):
            raise Internal(f"a batched function must return a list of {len(places)} answers")
        for place, answer in zip(places, answers, strict=True):
            try:
                results[place] = call.answer(answer)
            except Internal as ex:  # an answer without a JSON form fails alone
                results[place] = without_frames(ex)


class ListedDialect(NativeDialect):
    """Native dialect that gives the model all requests of a batch, by `infer_all`."""

    @property
    def batching(self) -> BatchForm:
        return BatchForm.LISTED

    def execute(self, requests: Sequence[Request]) -> Sequence[Response]:
        views = [NativeRequest(request, self._check, None, self._models) for request in requests]
        try:
            results = self._model.infer_all(views)
        except BaseException as ex:
            raise without_frames(from_exception(ex, _log, "infer failed")) from None
        return [
            Response(error=result) if isinstance(result, ShmserveError) else view.answer(result)
            for view, result in zip(views, results, strict=True)
        ]


class HintedStream(HintedModel):
    """Adapter around a function that gives any number of answers."""

    def infer(self, request: Any) -> Iterator[Any]:
        answers = self._called(request)
        try:
            for answer in answers:
                yield self.served.call.answer(answer)
        finally:
            if hasattr(answers, "close"):
                answers.close()


def _call(signature: HintedSignature, target: Any, model: str) -> HintedCall:
    """Return the way to call a function: on arrays if a hint has arrays, else on plain values."""
    hints = (*(argument.hint for argument in signature.arguments), signature.answer)
    if any(map(has_array, hints)):
        return ArrayCall(signature)
    return JsonCall(signature, model, summary_of(target))


def _warn_of_other_beginnings(target: Any, model: str) -> None:
    """Log a method that other servers call before the first request, if a class has no
    `__init__`."""
    if isinstance(target, type) and target.__init__ is object.__init__:  # type: ignore[misc]
        for method in filter(partial(hasattr, target), _BEGINNINGS):
            _log.warning("model '%s': %s is never called here: name it __init__", model, method)


class HintedDialect:
    """Runs a function or class by its type hints; implements the `Dialect` of the python backend.
    Attributes are valid after `start`."""

    reads_on_device: bool
    batching: BatchForm
    execute: Callable[[Sequence[Request]], Sequence[Response]]

    def __init__(self, target: Callable[..., Any]) -> None:
        self._target = target
        self._inner: NativeDialect | None = None

    def start(self, context: Context) -> ModelSpec:
        name = context.spec.name
        try:
            signature = signature_of(self._target)
            call = _call(signature, self._target, name)
            spec = auto_completed(call.complete, context.spec, context.directory, _HINTS)
        except (ConfigError, ValueError) as ex:
            text = ex.message if isinstance(ex, ConfigError) else str(ex)
            where = f"model '{name}': "
            raise ConfigError(where + text.removeprefix(where)) from None
        _warn_of_other_beginnings(self._target, name)
        inner: type[NativeDialect] = NativeDialect
        base = HintedModel
        if spec.decoupled:
            inner, base = NativeStreamDialect, HintedStream
        elif isinstance(call, JsonCall) and signature.batching:
            inner, base = ListedDialect, HintedBatch
        members = {
            "served": HintedFunction(self._target, signature, call),
            "device_tensors": getattr(self._target, "device_tensors", False),
        }
        dialect = self._inner = inner(type(name, (base,), members))
        spec = dialect.start(replace(context, spec=spec))
        self.reads_on_device, self.batching = dialect.reads_on_device, dialect.batching
        self.execute = dialect.execute
        return spec

    def close(self) -> None:
        if self._inner is not None:
            self._inner.close()
