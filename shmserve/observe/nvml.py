"""NVML, the driver's management library, through the package nvidia-ml-py.

It tells of devices without any CUDA call, so any process may ask it. A sick driver can hang
whoever calls it: every call goes through `bounded`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

DEADLINE_S = 2.0  # for one call; a healthy driver answers within milliseconds
_AGAIN_S = 30.0  # a driver may be loaded after this process has begun

T = TypeVar("T")

_log = logging.getLogger(__name__)
_calling = threading.Lock()


class _Library:
    """The module `pynvml` of this process, once it could be initialised. Any thread."""

    def __init__(self) -> None:
        self._loading = threading.Lock()
        self._module: ModuleType | None = None
        self._next_try = 0.0

    def module(self) -> ModuleType | None:
        """None: not yet; tried again from time to time."""
        with self._loading:  # who comes meanwhile waits for the answer
            if self._module is None and time.monotonic() >= self._next_try:
                self._next_try = time.monotonic() + _AGAIN_S
                bounded(self._load)
        return self._module

    def _load(self) -> None:
        import pynvml

        pynvml.nvmlInit()
        _log.info("NVIDIA driver %s", pynvml.nvmlSystemGetDriverVersion())
        self._module = pynvml


_library = _Library()


def bindings() -> ModuleType | None:
    """The module `pynvml`, initialised; None: there is no driver, or the package is missing.

    Its functions raise its own `NVMLError` and may hang: call them inside `bounded`.
    """
    return _library.module()


def bounded(call: Callable[[], T], seconds: float | None = None) -> T | None:
    """What `call` returns; None: it raised, or took longer than `seconds` (DEADLINE_S).

    Calls run one at a time, each in a thread of its own. One that hangs keeps its thread, and
    the calls after it get None when their seconds are over, until it returns.
    """
    seconds = DEADLINE_S if seconds is None else seconds
    results: list[T] = []
    over = threading.Event()
    if not _calling.acquire(timeout=seconds):
        return None

    def run() -> None:
        try:
            results.append(call())
        except Exception as ex:
            _log.debug("NVML: %s", ex)
        finally:
            _calling.release()
            over.set()

    try:
        threading.Thread(target=run, name="nvml", daemon=True).start()
    except RuntimeError:  # the system has no thread left: ask again later
        _calling.release()
        return None
    return results[0] if over.wait(seconds) and results else None
