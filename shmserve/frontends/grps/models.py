"""Which model a GRPS request is for."""

from __future__ import annotations

from shmserve.config import Settings
from shmserve.core.registry import ModelEntry
from shmserve.errors import InvalidArgument, NotFound
from shmserve.frontends.oip.seam import Dispatcher
from shmserve.protocol.grps_names import Names

_FIRST = ("1", "1.0.0")
_SHOWN = 128  # characters of a client's value that a message repeats


class Models:
    """See the module. One per process."""

    def __init__(self, dispatcher: Dispatcher, settings: Settings) -> None:
        self._dispatcher = dispatcher
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
        entry = self._named(name)
        if entry is None:
            shown = name[:_SHOWN]
            raise NotFound(f"Model '{shown}' not found. Models are named name-version.")
        return entry

    def _named(self, name: str) -> ModelEntry | None:
        found = self.names().find(name)
        if found is not None:
            return self._dispatcher.ready_model(*found)
        model, _, version = name.rpartition("-")
        if version in _FIRST:  # of what is served without being in the registry
            try:
                return self._dispatcher.ready_model(model, "1")
            except NotFound:
                pass
        return None

    def _default_model(self) -> ModelEntry:
        if self._default:
            return self._named(self._default) or self._dispatcher.ready_model(self._default)
        models = self._dispatcher.snapshot().models
        if len(models) != 1:
            raise InvalidArgument(
                "the request names no model, and the server has no default model"
                f" ({len(models)} models, setting grps_default_model)"
            )
        return self._dispatcher.ready_model(next(iter(models)))
