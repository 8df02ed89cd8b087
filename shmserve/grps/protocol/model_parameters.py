"""Parameters of models that take the GRPS message or raw HTTP requests, and the spec of such
models.

Parameters of config.pbtxt (for a GRPS project, its own files give them):

- ``grps``: "message": the model takes and gives serialized GRPS messages
- ``grps_version``: version of the model for GRPS clients, e.g. "1.0.0"
- ``grps_http_path``: the model's own path on the HTTP server
- ``grps_http_body``: "true": requests at that path reach the model raw; else as GRPS messages
- ``grps_streaming_ctrl_mode``, ``_key``, ``_content_type``: how an HTTP client asks for a stream
"""

import re
from collections.abc import Mapping

import msgspec

from shmserve.errors import ConfigError
from shmserve.grps.protocol import custom_http
from shmserve.protocol.triton_config import document
from shmserve.tensor.spec import ModelSpec, TensorSpec

MESSAGE = "grps"  # name of the tensor with a serialized message
STREAMING = "grps_streaming"  # request parameter: the client wants a stream
MODEL = "grps_model"  # request parameter: name of the model, as the client gave it

# parameters that a project adds for the GRPS frontends
MODELS = "grps_models"  # "name-version" of each model of the project, separated by commas
INFERENCE = "grps_inference_yml"  # texts of the files, for metadata requests
SERVER = "grps_server_yml"

STREAM_TYPE = "application/octet-stream"  # default content type of an HTTP stream
CTRL_MODES = ("query_param", "header_param", "body_param")
_PATH = re.compile(r"/[a-zA-Z0-9_\-/]*[a-zA-Z0-9_\-][a-zA-Z0-9_\-/]*")
_TAKEN = re.compile(r"/(v2|metrics)(/|$)|/grps/v1(/|$)")


def takes_message(spec: ModelSpec) -> bool:
    """Return True if the model takes the GRPS message."""
    return spec.parameters.get("grps") == "message"


def takes_http(spec: ModelSpec) -> bool:
    """Return True if the model takes raw HTTP requests."""
    return "grps_http_path" in spec.parameters and spec.parameters.get("grps_http_body") == "true"


def stream_type(parameters: Mapping[str, str]) -> str:
    """Return the content type of an HTTP stream from a model with these parameters."""
    return parameters.get("grps_streaming_ctrl_content_type", STREAM_TYPE)


def completed(spec: ModelSpec) -> ModelSpec:
    """Return the spec with the tensors of a model that takes messages or raw HTTP requests. Other
    specs are returned unchanged. Raise ConfigError if a parameter has an invalid value, or the
    model has tensors of its own."""
    if not any(name.startswith("grps") for name in spec.parameters):
        return spec
    _check(spec)
    if not (takes_message(spec) or takes_http(spec)):
        return spec
    names = (MESSAGE, custom_http.HEAD, custom_http.BODY) if takes_http(spec) else (MESSAGE,)
    inputs = tuple(TensorSpec(name, "UINT8", (-1,), len(names) > 1) for name in names)
    outputs = tuple(TensorSpec(name, "UINT8", (-1,)) for name in names)
    # the configuration may have tensors, too
    published = (spec.inputs or inputs, spec.outputs or outputs)
    if published != (inputs, outputs) or spec.max_batch_size:
        raise ConfigError(
            f"model '{spec.name}': a model that takes the GRPS message has no input, output "
            "and max_batch_size of its own in its configuration"
        )
    return document.completed(msgspec.structs.replace(spec, inputs=inputs, outputs=outputs))


def _check(spec: ModelSpec) -> None:
    allowed = {
        "grps": ("message",),
        "grps_http_body": ("true", "false"),
        "grps_streaming_ctrl_mode": CTRL_MODES,
    }
    for name, values in allowed.items():
        value = spec.parameters.get(name)
        if value is not None and value not in values:
            raise ConfigError(
                f"model '{spec.name}': parameters.{name} is '{value}', not {' or '.join(values)}"
            )
    path = spec.parameters.get("grps_http_path")
    if path is not None and (not _PATH.fullmatch(path) or _TAKEN.match(path)):
        raise ConfigError(
            f"model '{spec.name}': parameters.grps_http_path '{path}' is not a path of its own "
            "(letters, digits, '_', '-' and '/'; not below /v2, /metrics or /grps/v1)"
        )
