"""What a configuration that came with a load request left to the model's own config.pbtxt."""

from __future__ import annotations

import msgspec

from shmserve.protocol.triton_config import model_config
from shmserve.repository import read_folder, read_labels
from shmserve.tensor.spec import ModelSpec


def with_own_tensors(spec: ModelSpec, directory: str) -> ModelSpec:
    """The spec; if it tells no tensor at all, with those of the folder's config.pbtxt.

    A load request's configuration replaces config.pbtxt, and clients send such that change a
    single field: model formats that describe themselves fill in the rest, a model.py does not.

    Raises:
        ConfigError: the two do not go together.
    """
    if spec.inputs or spec.outputs:
        return spec
    own = read_folder(directory).config.document
    merged = msgspec.structs.replace(spec.config, input=own.input, output=own.output)
    config = model_config.of_spec(msgspec.structs.replace(spec, config=merged))
    return config.spec(spec.version, read_labels(config, directory))
