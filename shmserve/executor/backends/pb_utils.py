"""What models of the Triton dialect import as `triton_python_backend_utils`.

`shmserve.executor.backends.python` puts this module into `sys.modules` under that name.
Not here: calling other models from a model, CUDA tensors.
"""

from __future__ import annotations

import logging
from typing import Any

import ml_dtypes
import numpy as np

from shmserve.executor.backends.pb_config import AutoCompleteConfig as ModelConfig
from shmserve.executor.backends.pb_errors import TritonError, TritonModelException
from shmserve.executor.backends.pb_request import (
    FLAG_SEQUENCE_END,
    FLAG_SEQUENCE_START,
    RELEASE_ALL,
    RELEASE_RESCHEDULE,
    InferenceRequest,
    InferenceResponse,
)
from shmserve.executor.backends.pb_sender import RESPONSE_COMPLETE_FINAL, InferenceResponseSender
from shmserve.executor.backends.pb_tensor import Tensor
from shmserve.tensor.dtypes import BY_CONFIG_NAME, from_numpy

__all__ = [
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "Logger",
    "ModelConfig",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "numpy_to_triton_type",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "using_decoupled_model_transaction_policy",
]

TRITONSERVER_RESPONSE_COMPLETE_FINAL = RESPONSE_COMPLETE_FINAL
TRITONSERVER_REQUEST_RELEASE_ALL = RELEASE_ALL
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = RELEASE_RESCHEDULE
TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = FLAG_SEQUENCE_START
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = FLAG_SEQUENCE_END

_log = logging.getLogger("shmserve.model")

# The schema's numbers of the data types, by which some models look them up
_TYPE_NUMBERS = {
    "TYPE_BOOL": 1,
    "TYPE_UINT8": 2,
    "TYPE_UINT16": 3,
    "TYPE_UINT32": 4,
    "TYPE_UINT64": 5,
    "TYPE_INT8": 6,
    "TYPE_INT16": 7,
    "TYPE_INT32": 8,
    "TYPE_INT64": 9,
    "TYPE_FP16": 10,
    "TYPE_FP32": 11,
    "TYPE_FP64": 12,
    "TYPE_STRING": 13,
    "TYPE_BF16": 14,
}
_BY_NUMBER = {number: name for name, number in _TYPE_NUMBERS.items()}


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    """The request's input of that name, or None."""
    return next((t for t in inference_request.inputs() if t.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    """The response's output of that name, or None."""
    return next((t for t in inference_response.output_tensors() if t.name() == name), None)


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The entry of an input in the configuration, or None."""
    return _entry(model_config, "input", name)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    """The entry of an output in the configuration, or None."""
    return _entry(model_config, "output", name)


def _entry(config: dict[str, Any], kind: str, name: str) -> dict[str, Any] | None:
    return next((entry for entry in config.get(kind, []) if entry["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    """Whether the model may answer a request any number of times."""
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_string_to_numpy(triton_type_string: str) -> Any:
    """The numpy type of e.g. "TYPE_FP32"; strings are objects."""
    found = BY_CONFIG_NAME.get(triton_type_string)
    if found is None:
        raise TritonModelException(f"there is no data type '{triton_type_string}'")
    return ml_dtypes.bfloat16 if found.name == "BF16" else found.numpy.type


def triton_to_numpy_type(data_type: int) -> Any:
    """The numpy type of a data type's number in the schema."""
    return triton_string_to_numpy(_BY_NUMBER.get(data_type, str(data_type)))


def numpy_to_triton_type(data_type: Any) -> int:
    """The schema's number of a numpy type."""
    found = from_numpy(np.dtype(data_type))
    if found is None:
        raise TritonModelException(f"there is no data type for {np.dtype(data_type)}")
    return _TYPE_NUMBERS[found.config_name]


class Logger:
    """Triton's names for log levels; goes to the log of the executor."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    VERBOSE = "verbose"

    @staticmethod
    def log(msg: object, level: str = INFO) -> None:
        number = {"info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
        _log.log(number.get(level, logging.DEBUG), "%s", msg)

    @staticmethod
    def log_info(msg: object) -> None:
        _log.info("%s", msg)

    @staticmethod
    def log_warn(msg: object) -> None:
        _log.warning("%s", msg)

    @staticmethod
    def log_error(msg: object) -> None:
        _log.error("%s", msg)

    @staticmethod
    def log_verbose(msg: object) -> None:
        _log.debug("%s", msg)
