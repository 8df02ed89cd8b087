"""Model errors: turns exceptions of a model into errors for clients, and logs the tracebacks.

Texts of exceptions often quote paths, source files and addresses of this host. Clients must not
see them, so they are replaced by marks such as `<path>`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

import shmserve
from shmserve.cuda import runtime
from shmserve.errors import Code, Internal, ModelFailure, ShmserveError

MAX_TEXT = 500

_OWN = (os.path.dirname(shmserve.__file__) + os.sep, "<frozen importlib")  # files of frames
_INSTALL = (
    "install its distribution where the server, or the model's own environment, is installed, and"
    " restart the server or load the model again"
)
_TRACEBACK = "Traceback (most recent call last):"
# The path begins at a word's start (so "and/or" stays) and goes on after the slash
_PATH = re.compile(r"(?<![\w/.])(?:~|\.{1,2}|file:/{0,2})?/[^\s'\"():,;<>]*[^\s'\"():,;<>.]")
_QUOTED_PATH = re.compile(r"(?<=[\s(:=]['\"])/[^'\"]*(?=['\"])")  # with spaces
_WINDOWS_PATH = re.compile(r"\b[A-Za-z]:\\[^\s'\"():,;<>]+")
# (the lookbehind also prevents one scan for each character of a hostile text)
_SOURCE = re.compile(r"(?<![\w.-])[\w.-]+\.(?:py[cx]?|cc|cpp|cu|h|hpp|so(?:\.\d+)*)\b(?::\d+)?")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


def sanitised(text: str) -> str:
    """Return a text as `one_line` does, without paths, source files and addresses."""
    text = _error_line(text)
    for pattern, mark in (
        (_QUOTED_PATH, "<path>"),
        (_WINDOWS_PATH, "<path>"),
        (_PATH, "<path>"),
        (_SOURCE, "<file>"),
        (_ADDRESS, "<address>"),
    ):
        text = pattern.sub(mark, text)
    return one_line(text)


def one_line(text: str) -> str:
    """Return a text as one printable line of at most `MAX_TEXT` characters."""
    text = _error_line(text)
    text = "".join(c if c.isprintable() else " " for c in text)
    text = " ".join(text.split())
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def _error_line(text: str) -> str:
    """Return the last line of a traceback, which names the error, or any other text."""
    if _TRACEBACK in text:
        text = text.rstrip().splitlines()[-1]
    return text[: 8 * MAX_TEXT]  # a limit for the time of the patterns


def describe(ex: BaseException, clean: Callable[[str], str] = sanitised) -> str:
    """Return a text for clients. The type's name is added if the text is not clear without it.
    `clean`: makes a text fit to be shown; `one_line` is for operators."""
    kind = type(ex).__name__
    try:
        text = clean(str(ex))
    except Exception:  # an exception class whose __str__ is broken
        text = ""
    if not text:
        return kind
    return f"{kind}: {text}" if isinstance(ex, LookupError | SystemExit) else text


def from_exception(
    ex: BaseException,
    log: logging.Logger,
    what: str,
    code: Code = Code.INTERNAL,
    purpose: str = "request",
) -> ShmserveError:
    """Return the error to answer with. A `ShmserveError` is returned unchanged, but for a message
    that is no text, no Unicode, or very long.

    Args:
        ex: exception from the model's code.
        log: logger for the traceback.
        what: failed action, for the log.
        code: error code of the answer, unless CUDA is at fault. For INVALID_ARGUMENT, values that
            the model refuses, the log has a line without traceback.
        purpose: use of the GPU memory, for the text of an out-of-memory error.
    """
    if isinstance(ex, ShmserveError):
        return _sendable(ex)
    text, kind = describe(ex), type(ex).__name__
    shown = (type(ex), ex, _from_model(ex))
    level, frames = (
        (logging.WARNING, None) if code is Code.INVALID_ARGUMENT else (logging.ERROR, shown)
    )
    log.log(level, "%s: %s: %s", what, kind, text.removeprefix(f"{kind}: "), exc_info=frames)
    return from_cuda(ex, purpose) or ModelFailure(text, code)


def _sendable(error: ShmserveError) -> ShmserveError:
    """Return a model's error with a message that an answer can carry, whatever the model gave."""
    message = getattr(error, "message", None)
    text = message if isinstance(message, str) else describe(error)
    is_long = len(text) > 8 * MAX_TEXT
    return error.reword(one_line(text) if is_long else text.encode(errors="replace").decode())


def _from_model(ex: BaseException) -> TracebackType | None:
    """Return the exception's traceback without leading frames of the server and of imports. Return
    all frames if no other frame is left, except for a syntax error, whose text names the place."""
    frames = ex.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename.startswith(_OWN):
        frames = frames.tb_next
    return frames if frames is not None or isinstance(ex, SyntaxError) else ex.__traceback__


def without_frames(error: ShmserveError) -> ShmserveError:
    """Return the error without traceback, cause and context. In a response, the error and the
    frames would keep each other alive, and the frames would keep views of the inputs."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def from_load(ex: BaseException, log: logging.Logger, instance: str) -> ShmserveError:
    """Return the error for an exception while an instance was loaded, as `from_exception`."""
    error = from_exception(ex, log, f"loading {instance} failed", purpose="model")
    if isinstance(ex, ModuleNotFoundError) and isinstance(error, ModelFailure):
        return ModelFailure(f"{error.message}: {_INSTALL}", error.code)
    return error


# Torch's texts begin like this; further lines give advice. TorchScript's operators raise only
# RuntimeError, with torch's text at the end of TorchScript's own traceback.
_TORCH = re.compile(r"(?:\A|\n[\w.]+: )CUDA (?:(out of memory)|error: (.*))")


def from_cuda(ex: BaseException, purpose: str) -> ShmserveError | None:
    """Return the error for the client, or None if the exception is not from CUDA.

    After an out-of-memory error, the arrays of the failed call are released, and CuPy and torch
    have returned their unused memory to the device.
    """
    torchs = _TORCH.search(str(ex)) if isinstance(ex, RuntimeError) else None
    if runtime.is_out_of_memory(ex) or (torchs and torchs[1]):
        error = runtime.no_memory(_device(), purpose)
        traceback.clear_frames(ex.__traceback__)
        runtime.free_unused()
        return error
    if runtime.is_cuda_error(ex):
        return runtime.error_of(ex, _device(), purpose)
    if torchs:
        return Internal(f"CUDA device {_device()} failed: {torchs[2]}")
    return None


def _device() -> int:
    """Return the ordinal of the calling thread's device, on which the model has worked."""
    cupy, torch = sys.modules.get("cupy"), sys.modules.get("torch")
    with contextlib.suppress(Exception):  # a lost device does not even answer this
        if cupy is not None:
            return int(cupy.cuda.runtime.getDevice())
        if torch is not None:
            return int(torch.cuda.current_device())
    return 0
