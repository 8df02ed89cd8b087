"""What a model raised, as an error for the client; the traceback goes to the log.

Texts of exceptions often quote paths, source files and addresses of this host, which
are nobody else's business, so they are blotted out.
"""

from __future__ import annotations

import logging
import re

from shmserve.errors import Code, ModelFailure, ShmserveError
from shmserve.executor.backends.cuda_errors import from_cuda

MAX_TEXT = 500

_INSTALL = "install its distribution where the server is installed, and load the model again"
_TRACEBACK = "Traceback (most recent call last):"
# begins at a word's start (so "and/or" stays) and has something after the slash
_PATH = re.compile(r"(?<![\w/.])(?:~|\.{1,2}|file:/{0,2})?/[^\s'\"():,;<>]*[^\s'\"():,;<>.]")
_WINDOWS_PATH = re.compile(r"\b[A-Za-z]:\\[^\s'\"():,;<>]+")
# (the lookbehind also keeps a hostile text from being scanned once for each character)
_SOURCE = re.compile(r"(?<![\w.-])[\w.-]+\.(?:py[cx]?|cc|cpp|cu|h|hpp|so(?:\.\d+)*)\b(?::\d+)?")
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,}\b")


def sanitised(text: str) -> str:
    """One line without paths, source files and addresses, at most `MAX_TEXT` characters."""
    if _TRACEBACK in text:  # only its last line says what happened
        text = text.rstrip().splitlines()[-1]
    text = text[: 8 * MAX_TEXT]  # the patterns need not see a megabyte
    for pattern, mark in (
        (_WINDOWS_PATH, "<path>"),
        (_PATH, "<path>"),
        (_SOURCE, "<file>"),
        (_ADDRESS, "<address>"),
    ):
        text = pattern.sub(mark, text)
    text = "".join(c if c.isprintable() else " " for c in text)
    text = " ".join(text.split())
    return text if len(text) <= MAX_TEXT else text[: MAX_TEXT - 1] + "…"


def describe(ex: BaseException) -> str:
    """A text for clients. The type's name is told where the text does not stand by itself."""
    kind = type(ex).__name__
    try:
        text = sanitised(str(ex))
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
    """The error to answer with; errors of our own tree pass as they are.

    Args:
        ex: what the model's code raised.
        log: gets the traceback.
        what: what was being done, for the log.
        code: of the answer, unless CUDA is at fault.
        purpose: what a GPU's memory was needed for, if it was too small.
    """
    if isinstance(ex, ShmserveError):
        return ex
    log.error("%s: %s: %s", what, type(ex).__name__, describe(ex), exc_info=ex)
    return from_cuda(ex, purpose) or ModelFailure(describe(ex), code)


def without_frames(error: ShmserveError) -> ShmserveError:
    """The error without the frames it was raised through: those would have it, if it becomes a
    response, and it them, and they the views of the request's inputs."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def from_load(ex: BaseException, log: logging.Logger, instance: str) -> ShmserveError:
    """As `from_exception`, of what was raised while an instance was loaded."""
    error = from_exception(ex, log, f"loading {instance} failed", purpose="model")
    if isinstance(ex, ModuleNotFoundError) and isinstance(error, ModelFailure):
        return ModelFailure(f"{error.message}: {_INSTALL}", error.code)
    return error
