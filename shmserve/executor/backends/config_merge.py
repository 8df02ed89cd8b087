"""Config merge: completes a load request's configuration from the model's own config.pbtxt."""

from __future__ import annotations

import msgspec

from shmserve.protocol.triton_config import model_config
from shmserve.repository import read_folder, read_labels
from shmserve.tensor.spec import ModelSpec


def with_own_tensors(spec: ModelSpec, directory: str) -> ModelSpec:
    """Return the spec. If the spec has no tensors at all, add the tensors of the folder's
    config.pbtxt.

    The configuration of a load request replaces config.pbtxt, and clients send configurations that
    change a single field. Model formats that describe themselves supply the missing fields, but a
    model.py does not.

    Raise ConfigError if the two configurations contradict each other.
    """
    if spec.inputs or spec.outputs:
        return spec
    own = read_folder(directory).config.document
    merged = msgspec.structs.replace(spec.config, input=own.input, output=own.output)
    config = model_config.of_spec(msgspec.structs.replace(spec, config=merged))
    return config.spec(spec.version, read_labels(config, directory))
