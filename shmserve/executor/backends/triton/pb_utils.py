"""Module `triton_python_backend_utils`, as models of the Triton dialect import it.

`backends.python.python_backend` puts this module into `sys.modules` under the name.
"""

from __future__ import annotations

from typing import Any

from shmserve.core.stats.custom_metrics import MetricKind
from shmserve.executor.backends.triton.auto_complete import AutoCompleteConfig as ModelConfig
from shmserve.executor.backends.triton.called_request import FLAG_SEQUENCE_END, FLAG_SEQUENCE_START
from shmserve.executor.backends.triton.data_types import (
    TRITON_STRING_TO_NUMPY,
    DataType,
    deserialize_bytes_tensor,
    numpy_to_triton_type,
    serialize_byte_tensor,
    triton_string_to_numpy,
    triton_to_numpy_type,
)
from shmserve.executor.backends.triton.exceptions import TritonError, TritonModelException
from shmserve.executor.backends.triton.inference_request import InferenceRequest
from shmserve.executor.backends.triton.inference_response import InferenceResponse
from shmserve.executor.backends.triton.metrics import (
    COUNTER,
    GAUGE,
    HISTOGRAM,
    Metric,
    MetricFamily,
)
from shmserve.executor.backends.triton.model_logger import Logger, LogLevel
from shmserve.executor.backends.triton.other_models import (
    ResponseIterator,
    is_model_ready,
    load_model,
    unload_model,
)
from shmserve.executor.backends.triton.response_sender import (
    RESPONSE_COMPLETE_FINAL,
    InferenceResponseSender,
)
from shmserve.executor.backends.triton.tensor import Tensor
from shmserve.executor.backends.triton.trace import (
    TRITONSERVER_MEMORY_CPU,
    TRITONSERVER_MEMORY_GPU,
    TRITONSERVER_REQUEST_RELEASE_ALL,
    TRITONSERVER_REQUEST_RELEASE_RESCHEDULE,
    InferenceTrace,
    MemoryType,
    PreferredMemory,
)

__all__ = [
    "COUNTER", "GAUGE", "HISTOGRAM", "TRITONSERVER_MEMORY_CPU", "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END", "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL", "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL", "TRITON_STRING_TO_NUMPY", "DataType",
    "InferenceRequest", "InferenceResponse", "InferenceResponseSender", "InferenceTrace",
    "LogLevel", "Logger", "MemoryType", "Metric", "MetricFamily", "MetricKind", "ModelConfig",
    "PreferredMemory", "ResponseIterator", "Tensor", "TritonError", "TritonModelException",
    "deserialize_bytes_tensor", "get_input_config_by_name", "get_input_tensor_by_name",
    "get_model_dir", "get_output_config_by_name", "get_output_tensor_by_name", "is_model_ready",
    "load_model", "numpy_to_triton_type", "serialize_byte_tensor", "triton_string_to_numpy",
    "triton_to_numpy_type", "unload_model", "using_decoupled_model_transaction_policy",
]  # fmt: skip

TRITONSERVER_RESPONSE_COMPLETE_FINAL = RESPONSE_COMPLETE_FINAL
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = FLAG_SEQUENCE_START
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = FLAG_SEQUENCE_END

_model_dir = ""  # an executor runs a single model


def set_model_dir(directory: str) -> None:
    """Set the folder of the model's version, once (for the server, not for models)."""
    global _model_dir
    _model_dir = directory


def get_model_dir() -> str:
    """Return the folder of the model's version."""
    return _model_dir


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """Return the request's input with a name, or None."""
    return next((t for t in inference_request.inputs() if t.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """Return the response's output with a name, or None."""
    return next((t for t in inference_response.output_tensors() if t.name() == name), None)


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the configuration entry of an input, or None."""
    return _entry(model_config, "input", name)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """Return the configuration entry of an output, or None."""
    return _entry(model_config, "output", name)


def _entry(config: dict[str, Any], kind: str, name: str) -> dict[str, Any] | None:
    return next((entry for entry in config.get(kind, []) if entry["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Return True if the model may answer a request any number of times."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))
