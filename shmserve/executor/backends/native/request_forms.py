"""Extensions that give a model.py of the native dialect other requests than those with tensors."""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import Struct

from shmserve import extensions
from shmserve.tensor.spec import ModelSpec


class RequestForm(Struct, frozen=True):
    """The classes of a model's requests: one derived from `NativeRequest`, and one derived from
    `StreamRequest`, for decoupled models.

    They may have further properties and override `answer`, which makes a response of what the
    model gives. They have no use for `device_tensors`.
    """

    request: type[Any]
    stream: type[Any]


class FormChooser(Protocol):
    """An extension of the group `extensions.NATIVE_REQUESTS`. Called in an executor, before the
    class `Model` is made, if the model has a parameter with the extension's name, or one that
    begins with it and "_". Where such a form has tensors of its own for its requests, the reader
    of the same name (`FolderReader.with_parameters`) tells them.

    Pipelines whose first and last model have the same value of the parameter with that name take
    such requests, too; a request's parameter with the name and "_streaming" is for the last model.
    """

    def __call__(self, spec: ModelSpec) -> RequestForm | None:
        """The form of this model's requests; None: tensors, after all.

        Raises:
            ConfigError: the model cannot be served.
        """
        ...


def form_of(spec: ModelSpec) -> RequestForm | None:
    """The form of a model's requests; None: tensors."""
    choosers = extensions.concerned(extensions.NATIVE_REQUESTS, spec.parameters)
    return next((form for chooser in choosers if (form := chooser(spec)) is not None), None)
