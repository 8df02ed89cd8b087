"""Which model a GRPS request is for."""

from __future__ import annotations

from shmserve.config import Settings
from shmserve.core.registry import ModelEntry
from shmserve.errors import InvalidArgument, NotFound
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.grps import settings as grps_settings
from shmserve.grps.protocol.names import Names

_SHOWN = 128  # characters of a client's value that a message repeats


class ModelNames:
    """The models by all names that clients may say; one per process."""

    def __init__(self, dispatcher: DispatchApi, settings: Settings) -> None:
        self._dispatcher = dispatcher
        self._default = grps_settings.of(settings).default_model
        self._names: Names | None = None

    def names(self) -> Names:
        """The names of this moment, worked out once per change of the registry."""
        snapshot = self._dispatcher.snapshot()
        names = self._names
        if names is None or names.snapshot is not snapshot:
            names = self._names = Names(snapshot)
        return names

    def ready(self, name: str) -> ModelEntry:
        """The model of a request, which may leave the choice to us (empty name).

        Raises:
            NotFound: there is no such model.
            InvalidArgument: none was named, and none is the default.
            Unavailable: it is not ready.
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
