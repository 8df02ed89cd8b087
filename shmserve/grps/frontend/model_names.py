"""Which model a GRPS request is for."""

from __future__ import annotations

from shmserve.config import Settings
from shmserve.core.registry import ModelEntry
from shmserve.errors import InvalidArgument, NotFound
from shmserve.frontends.oip.seam import Dispatcher
from shmserve.grps.frontend import pipelines as pipeline
from shmserve.grps.protocol.names import Names

_SHOWN = 128  # characters of a client's value that a message repeats


class Models:
    """See the module. One per process."""

    def __init__(self, dispatcher: Dispatcher, settings: Settings) -> None:
        self._dispatcher = dispatcher
        self._settings = settings
        self._default = settings.grps_default_model
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
        found = self.names().find(name)
        if found is None and (line := pipeline.named(name, self._settings)):
            return self._dispatcher.ready_model(line)
        if found is None:
            shown = name[:_SHOWN]
            raise NotFound(f"Model '{shown}' not found. Models are named name-version.")
        return self._dispatcher.ready_model(*found)

    def _default_model(self) -> ModelEntry:
        if self._default:
            found = self.names().find(self._default)
            line = pipeline.named(self._default, self._settings)
            return self._dispatcher.ready_model(*(found or (line or self._default,)))
        names = self.names()
        if not names.default:
            raise InvalidArgument(
                "the request names no model, and the server has no default model"
                f" ({len(names.snapshot.models)} models, setting grps_default_model)"
            )
        return self._dispatcher.ready_model(names.default)
