"""CUDA provider of ONNX Runtime: sessions on a GPU, provider options, and CUDA errors."""

from __future__ import annotations

import logging
import re
from typing import Any

from shmserve.core.device_names import ordinal_of
from shmserve.cuda import runtime
from shmserve.errors import ConfigError, Internal, ShmserveError
from shmserve.executor.backend import Context
from shmserve.tensor.spec import ModelSpec

_log = logging.getLogger(__name__)

_CUDA, _CPU = "CUDAExecutionProvider", "CPUExecutionProvider"

# Triton's values of a parameter -> values of the provider's option with the same name
_CHOICES = {
    "cudnn_conv_algo_search": {"0": "EXHAUSTIVE", "1": "HEURISTIC", "2": "DEFAULT"},
    "arena_extend_strategy": {"0": "kNextPowerOfTwo", "1": "kSameAsRequested"},
    "do_copy_in_default_stream": {"0": "0", "1": "1"},
}
_LIMIT = "gpu_mem_limit"
PARAMETERS = {*_CHOICES, _LIMIT}

_NO_MEMORY = re.compile(
    "Failed to allocate memory for requested buffer|Available memory of .* is smaller than"
    "|CUDA failure 2:|CUBLAS_STATUS_ALLOC_FAILED"
)
_FAILED = re.compile(r"CUDA failure [0-9]+: ([^;\n]*[^;\s])")  # host, file and line follow


def open_session(ort: Any, path: str, options: Any, context: Context) -> tuple[Any, int | None]:
    """Return a session, and the ordinal of the CUDA device on which it computes; None: the CPU.

    Raises:
        ConfigError: the instance must be on a GPU, and ONNX Runtime cannot use a GPU here; or a
            parameter has a wrong value.
    """
    ordinal = ordinal_of(context.device)
    if ordinal is not None:
        own = _provider_options(context.spec, ordinal)
        session, reason = _cuda_session(ort, path, options, own)
        if session is not None:
            return session, ordinal
        if not context.auto:
            name = context.spec.name
            raise ConfigError(f"model '{name}': backend 'onnxruntime' cannot use a GPU: {reason}")
        _log.info("runs on the CPU: ONNX Runtime cannot use a GPU: %s", reason)
    return ort.InferenceSession(path, options, providers=[_CPU]), None


def _cuda_session(ort: Any, path: str, options: Any, own: dict[str, str]) -> tuple[Any, str]:
    """Return a session on a GPU, or None and the reason."""
    if _CUDA not in ort.get_available_providers():
        return None, "install onnxruntime-gpu instead of onnxruntime"
    try:
        runtime.cupy()
    except ConfigError as ex:
        return None, ex.message
    if hasattr(ort, "preload_dlls"):  # loads CUDA and cuDNN from Python packages
        ort.preload_dlls()
    session = ort.InferenceSession(path, options, providers=[(_CUDA, own), _CPU])
    if _CUDA not in session.get_providers():
        return (
            None,
            "its CUDA provider does not start: are its versions of CUDA and cuDNN installed?",
        )
    return session, ""


def _provider_options(spec: ModelSpec, ordinal: int) -> dict[str, str]:
    options = {"device_id": str(ordinal)}
    for name, text in spec.parameters.items():
        where = f"model '{spec.name}': parameters.{name} '{text}'"
        if name in _CHOICES:
            if text not in _CHOICES[name]:
                raise ConfigError(f"{where} is none of {', '.join(_CHOICES[name])}")
            options[name] = _CHOICES[name][text]
        elif name == _LIMIT:
            if not (text.isascii() and text.isdigit() and 0 < int(text) < 1 << 64):
                raise ConfigError(f"{where} is no number of bytes")
            options[name] = text
    return options


def error_of(ex: Exception, ordinal: int | None, purpose: str) -> ShmserveError | None:
    """Return the error for clients if an exception of ONNX Runtime is about CUDA, else None.

    Args:
        ex: exception of ONNX Runtime.
        ordinal: ordinal of the GPU on which the session computes; None: the CPU.
        purpose: use of the GPU memory, for the text of an out-of-memory error.
    """
    if ordinal is None or isinstance(ex, ShmserveError):
        return None
    if _NO_MEMORY.search(str(ex)):
        return runtime.no_memory(ordinal, purpose)
    failed = _FAILED.search(str(ex))
    return Internal(f"CUDA device {ordinal} failed: {failed[1]}") if failed else None
