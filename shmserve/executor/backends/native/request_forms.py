"""Request forms: extensions that give native models other requests than tensor requests."""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import Struct

from shmserve import extensions
from shmserve.tensor.spec import ModelSpec


class RequestForm(Struct, frozen=True):
    """Classes of a model's requests: one derived from `NativeRequest`, and for decoupled models
    one derived from `StreamRequest`.

    The classes may have further properties, and override `answer`, which makes a response of the
    model's result. `device_tensors` has no effect with them.
    """

    request: type[Any]
    stream: type[Any]


class FormChooser(Protocol):
    """Extension of the group `extensions.NATIVE_REQUESTS`.

    An executor calls the extension before making the class `Model`, if a parameter of the model
    has the extension's name, or begins with the name and "_". If the form has its own tensors for
    requests, the reader of the same name (`FolderReader.with_parameters`) describes the tensors.

    Pipelines take such requests, too, if the first and the last model have the same value of the
    parameter with the extension's name. A request's parameter with the name and "_streaming" is
    for the last model.
    """

    def __call__(self, spec: ModelSpec) -> RequestForm | None:
        """Return the form of this model's requests, or None for tensors.

        Raises:
            ConfigError: the model cannot be served.
        """
        ...


def form_of(spec: ModelSpec) -> RequestForm | None:
    """Return the form of a model's requests, or None for tensors."""
    choosers = extensions.concerned(extensions.NATIVE_REQUESTS, spec.parameters)
    return next((form for chooser in choosers if (form := chooser(spec)) is not None), None)
