"""Signature of a hinted model: the function of a model.py, the arguments, and the hint of the
answer. docs/one_file.md has the rules."""

from __future__ import annotations

import inspect
import types
import typing
from collections import abc
from collections.abc import Callable
from types import ModuleType
from typing import Any

from msgspec import Struct

from shmserve.errors import ConfigError
from shmserve.model import BATCHED, Batching, ModelRequest

METHOD = "predict"
_STREAMS = (abc.Iterator, abc.Generator, abc.Iterable)
_ORDINARY = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_NONE = type(None)
_EMPTY = inspect.Parameter.empty


class Argument(Struct, frozen=True):
    """Argument of a function. `default`: `inspect.Parameter.empty` if the argument is required."""

    name: str
    hint: Any
    default: Any

    @property
    def optional(self) -> bool:
        return self.default is not _EMPTY


class HintedSignature(Struct, frozen=True):
    """Arguments and answer of a hinted function.

    Attributes:
        request: name of the argument that gets the request; "": no argument.
        answer: hint of the answer, for a stream of each answer.
        streams: whether the function gives any number of answers.
        batching: arguments of the decorator `batched`, or None.
    """

    arguments: tuple[Argument, ...]
    request: str
    answer: Any
    streams: bool
    batching: Batching | None


def find_target(module: ModuleType) -> Callable[..., Any] | None:
    """Return the model of a file: the class with a method `predict`, else the function `predict`,
    else the only function. Names with an underscore in front, and imported objects, do not count.
    Return None without such an object. Raise ConfigError for several."""
    own = {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
    }
    functions = {name: value for name, value in own.items() if inspect.isfunction(value)}
    kinds = {n: v for n, v in own.items() if isinstance(v, type) and hasattr(v, METHOD)}
    named = {name: value for name, value in functions.items() if name == METHOD}
    found: dict[str, Any] = kinds or named or functions
    if len(found) > 1:
        *_, last = names = sorted(found)
        kind, one = ("class", "") if kinds else ("def", f"name the model's function {METHOD}, or ")
        raise ConfigError(
            f"{' and '.join(names)} may each be the model: {one}write an underscore in front of"
            f" every name but the model's, such as {kind} _{last}"
        )
    return next(iter(found.values()), None)


def signature_of(target: Callable[..., Any]) -> HintedSignature:
    """Return the signature of a model. Raise ConfigError for a missing or unreadable hint; the text
    names the argument and the remedy."""
    function, bound = target, False
    if isinstance(target, type):
        function = getattr(target, METHOD)
        static = inspect.getattr_static(target, METHOD)
        bound = not isinstance(static, staticmethod | classmethod)
    inner = inspect.unwrap(function)
    if inspect.iscoroutinefunction(inner) or inspect.isasyncgenfunction(inner):
        raise ConfigError(f"{function.__name__} is async: write def, which runs in a process apart")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except Exception as ex:
        raise ConfigError(f"the hints of {function.__name__} cannot be read: {ex}") from None
    parameters = list(inspect.signature(function).parameters.values())[bound:]
    arguments = [_argument(parameter, hints) for parameter in parameters]
    requests = [argument.name for argument in arguments if argument.hint is ModelRequest]
    if "return" not in hints:
        raise ConfigError(f"{function.__name__} has no hint of its answer: write -> and a type")
    answer, streams = plain(hints["return"]), inspect.isgeneratorfunction(inner)
    if typing.get_origin(answer) in _STREAMS:
        if not typing.get_args(answer):
            raise ConfigError(f"{function.__name__} yields unknown answers: write -> Iterator[...]")
        answer, streams = typing.get_args(answer)[0], True
    return HintedSignature(
        tuple(argument for argument in arguments if argument.hint is not ModelRequest),
        requests[0] if requests else "",
        plain(answer),
        streams,
        getattr(function, BATCHED, getattr(target, BATCHED, None)),
    )


def set_batching(document: dict[str, Any], batching: Batching) -> None:
    """Set a configuration's batching where the configuration has none."""
    document["max_batch_size"] = document.get("max_batch_size") or batching.max_size
    if "sequence_batching" not in document:
        delay_us = int(batching.delay_ms * 1000)
        delay = {"max_queue_delay_microseconds": delay_us} if delay_us else {}
        document.setdefault("dynamic_batching", delay)


def _argument(parameter: inspect.Parameter, hints: dict[str, Any]) -> Argument:
    name = parameter.name
    if parameter.kind not in _ORDINARY:
        raise ConfigError(f"argument '{parameter}': write arguments with a name each")
    if name not in hints:
        example = "NDArray[np.float32] for an array, or str"
        raise ConfigError(f"argument '{name}' has no type hint: write {name}: {example}")
    hint = plain(hints[name])
    nullable = without_none(hint) is not hint
    default = None if nullable and parameter.default is _EMPTY else parameter.default
    return Argument(name, hint, default)


def without_none(hint: Any) -> Any:
    """Return a hint without `| None`, the hint itself if it has none."""
    hint = plain(hint)
    if typing.get_origin(hint) is typing.Annotated:
        inner, *notes = typing.get_args(hint)
        inner = plain(inner)
        bare = without_none(inner)
        return hint if bare is inner else typing.Annotated[(bare, *notes)]
    members = typing.get_args(hint)
    if typing.get_origin(hint) not in (typing.Union, types.UnionType) or _NONE not in members:
        return hint
    return plain(typing.Union[tuple(m for m in members if m is not _NONE)])  # noqa: UP007


def plain(hint: Any) -> Any:
    """Return the type behind a name of a statement `type Name = ...`. For a generic name, such as
    numpy's `NDArray[...]`, each call returns a new object."""
    while True:
        origin = typing.get_origin(hint)
        if hasattr(origin, "__value__"):  # first: `Name[int]` passes on the attributes of `Name`
            given = dict(zip(origin.__type_params__, typing.get_args(hint), strict=True))
            value = origin.__value__
            free = getattr(value, "__parameters__", ())
            hint = value[tuple(given[one] for one in free)] if free else value
        elif hasattr(hint, "__value__"):
            hint = hint.__value__
        else:
            return hint
