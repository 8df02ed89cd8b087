"""Composed models: adds ensembles and pipelines to the models of the registry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from shmserve import extensions
from shmserve.core.control import compositions
from shmserve.core.control.compositions import Models
from shmserve.core.scheduling import pipeline_wiring
from shmserve.protocol.triton_config import document
from shmserve.tensor.spec import ModelSpec


def composed(models: Models, pipelines: Mapping[str, Sequence[str]]) -> Models:
    """Return the models to publish: the loaded models, with ensembles and the pipelines of the
    setting."""
    return compositions.with_pipelines(compositions.compose(models), pipelines, make_pipeline)


def make_pipeline(name: str, models: Sequence[ModelSpec]) -> ModelSpec:
    """Return the spec of a pipeline, with the configuration shown to clients.

    Raises:
        ConfigError: two models of the pipeline do not fit together.
    """
    spec = pipeline_wiring.pipeline(name, models)
    first, last = models[0].parameters, models[-1].parameters
    forms = {  # request forms besides tensors, such as messages
        form: first[form]
        for form in extensions.names(extensions.NATIVE_REQUESTS)
        if form in first and first[form] == last.get(form)
    }
    return document.completed(msgspec.structs.replace(spec, parameters=forms))
