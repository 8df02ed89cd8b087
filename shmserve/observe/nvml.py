"""NVML, the driver's management library, through the package nvidia-ml-py.

NVML reports on devices without any CUDA call, so any process may use NVML. A sick driver can hang
the caller: every call goes through `bounded`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

DEADLINE_S = 2.0  # for one call; a healthy driver answers within milliseconds
_AGAIN_S = 30.0  # pause between attempts: a driver may be loaded after the start of this process

T = TypeVar("T")

_log = logging.getLogger(__name__)
_calling = threading.Lock()


class _Library:
    """The module `pynvml` of this process, once initialised. Any thread."""

    def __init__(self) -> None:
        self._loading = threading.Lock()
        self._module: ModuleType | None = None
        self._next_try = 0.0

    def module(self) -> ModuleType | None:
        """Return the module, or None if not loaded yet. Tries again from time to time."""
        with self._loading:  # other callers meanwhile wait for the result
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
    """Return the initialised module `pynvml`, or None without a driver or without the package.

    The module's functions raise `NVMLError` and may hang: call them inside `bounded`.
    """
    return _library.module()


def bounded(call: Callable[[], T], seconds: float | None = None) -> T | None:
    """Return the result of `call`, or None if `call` raised or took longer than `seconds`.

    The default of `seconds` is DEADLINE_S. Calls run one at a time, each in a new thread. A
    hanging call keeps its thread, and later calls return None after their deadline until the
    hanging call returns.
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
    except RuntimeError:  # the system has no thread left; a later call may succeed
        _calling.release()
        return None
    return results[0] if over.wait(seconds) and results else None
