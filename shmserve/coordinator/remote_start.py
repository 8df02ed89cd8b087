"""Start of a service with remote model repositories. The service starts at once if the cache holds
every wanted model; otherwise the service waits until the models have been fetched."""

from __future__ import annotations

import logging

from msgspec import Struct

from shmserve import model_places
from shmserve.config import Settings
from shmserve.coordinator import assembly
from shmserve.coordinator.assembly import Parts
from shmserve.coordinator.models import desired_models
from shmserve.coordinator.models.background import Background
from shmserve.coordinator.models.desired_models import DesiredModels, Library
from shmserve.errors import ConfigError
from shmserve.protocol.control.model_messages import ModelsFetched

_log = logging.getLogger(__name__)


def waits(settings: Settings, library: Library) -> bool:
    """Return True if a model to serve has never been fetched."""
    wanted = settings.load_models if settings.model_control == "explicit" else ("*",)
    return model_places.fetches(settings) and library.pending(
        model_places.repository_paths(settings), wanted
    )


def survey(settings: Settings, library: Library) -> dict[str, str]:
    """Return the fingerprints of all models, by name. Return {} if the repository cannot be
    read."""
    try:
        return library.survey(model_places.repository_paths(settings))
    except ConfigError:  # the scan will report the error
        return {}


class RemoteStart(Struct):
    """Reacts to rounds of the fetcher. `waiting`: true while no model is served yet."""

    _settings: Settings
    _library: Library
    _background: Background
    _parts: Parts
    _tried: dict[str, str]
    _waiting: bool

    def fetched(self, message: ModelsFetched) -> None:
        """Take in the end of a round."""
        unlisted = "; ".join(message.unlisted)
        notices = {**self._parts.control.remote.notices, **({"": unlisted} if unlisted else {})}
        self._parts.publication.tell(notices)
        if not self._waiting:
            self._parts.control.renew()
        elif not self._library.pending(model_places.repository_paths(self._settings), ()):
            self._waiting = False
            if not self._background.submit(self._look, self._begin):
                self._wait()
        else:
            _log.error("not ready: %s", unlisted)

    def _look(self) -> tuple[dict[str, str], DesiredModels]:
        marks = survey(self._settings, self._library)
        return marks, desired_models.choose(self._settings, self._library.scan)

    def _begin(self, found: tuple[dict[str, str], DesiredModels] | Exception) -> None:
        if isinstance(found, Exception):
            self._wait()
            return
        self._tried.update(found[0])
        assembly.begin(self._parts, found[1], found[0])

    def _wait(self) -> None:
        self._waiting = True
        self._parts.control.remote.again()
