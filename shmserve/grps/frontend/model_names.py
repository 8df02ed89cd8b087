"""Choice of the model that a GRPS request is for."""

from __future__ import annotations

from shmserve.config import Settings
from shmserve.core.registry import ModelEntry
from shmserve.errors import InvalidArgument, NotFound
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.grps import settings as grps_settings
from shmserve.grps.protocol.names import Names

_SHOWN = 128  # limit of characters of a client's value that a message repeats


class ModelNames:
    """The models of a process by all names that clients may use."""

    def __init__(self, dispatcher: DispatchApi, settings: Settings) -> None:
        self._dispatcher = dispatcher
        self._default = grps_settings.of(settings).default_model
        self._names: Names | None = None

    def names(self) -> Names:
        """Return the current names, computed once per change of the registry."""
        snapshot = self._dispatcher.snapshot()
        names = self._names
        if names is None or names.snapshot is not snapshot:
            names = self._names = Names(snapshot)
        return names

    def ready(self, name: str) -> ModelEntry:
        """Return the model of this name, or the default model for an empty name.

        Raises:
            NotFound: there is no such model.
            InvalidArgument: the name is empty, and there is no default model.
            Unavailable: the model is not ready.
        """
        if not name:
            return self._default_model()
        match = self.names().find(name)
        if match is None:
            shown = name[:_SHOWN]
            raise NotFound(f"Model '{shown}' not found. ModelNames are named name-version.")
        return self._dispatcher.ready_model(*match)

    def _default_model(self) -> ModelEntry:
        if self._default:
            match = self.names().find(self._default)
            return self._dispatcher.ready_model(*(match or (self._default,)))
        names = self.names()
        if not names.default:
            raise InvalidArgument(
                "the request names no model, and the server has no default model"
                f" ({len(names.snapshot.models)} models, setting grps_default_model)"
            )
        return self._dispatcher.ready_model(names.default)
