"""Model repository extension without a transport: index, load, unload."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from shmserve.config import Settings
from shmserve.core.access import Access
from shmserve.core.caller import Caller
from shmserve.errors import Unimplemented
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.protocol.control.data_messages import Parameter
from shmserve.protocol.oip import load_request


class IndexRow(Struct, frozen=True, omit_defaults=True):
    """A version of a model; only the name for a model that was never loaded."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


class Repository:
    """Lists, loads and unloads models for any transport. A process has a single object."""

    def __init__(self, dispatcher: DispatchApi, settings: Settings, access: Access) -> None:
        self._dispatcher = dispatcher
        self._access = access
        self._settings = settings

    def index(self, ready_only: bool = False) -> list[IndexRow]:
        """Return every version of every model, sorted by name."""
        snapshot = self._dispatcher.snapshot()
        rows = [
            IndexRow(
                name, version, entry.state.value, entry.reason or snapshot.notices.get(name, "")
            )
            for name, versions in snapshot.models.items()
            for version, entry in versions.items()
        ]
        for key, reason in {**snapshot.refused, **snapshot.failed}.items():
            name, _, version = key.partition("/")
            rows.append(IndexRow(name, version, "UNAVAILABLE", reason))
        if ready_only:
            rows = [row for row in rows if row.state == "READY"]
        elif self._settings.model_control == "explicit":
            listed = {row.name for row in rows}
            rows += [
                IndexRow(n) for n in self._dispatcher.coordinator.model_folders() if n not in listed
            ]
        return sorted(rows, key=lambda row: (row.name, len(row.version), row.version))

    def load(
        self, name: str, parameters: Mapping[str, Parameter | bytes], caller: Callable[[], Caller]
    ) -> None:
        """Load a model, or load a model again. Return once the model serves.

        Args:
            name: the model.
            parameters: ``config``, a configuration as JSON, and ``file:<path>``, the content of a
                file. If there are files, the model consists of ``config`` and files alone.
            caller: looks up the caller; called only if the caller matters.

        Raises:
            ShmserveError: the request was refused, or the model cannot be loaded.
        """
        load_request.check_name(name, self._settings)
        if parameters and not self._access.open_to_all("send models"):
            self._access.check("send models", caller())
        config, files = load_request.overrides(name, parameters, self._settings)
        self._dispatcher.coordinator.load_model(name, config, files)

    def unload(self, name: str, dependents: bool = False) -> None:
        """Unload a model; with `dependents` also the models loaded only as steps of this model.

        Raises:
            ShmserveError: the request was refused.
        """
        load_request.check_name(name, self._settings)
        self._dispatcher.coordinator.unload_model(name, dependents)


def refuse_repository(name: str) -> None:
    """Refuse requests that name a repository: the only repository has no name.

    Raises:
        Unimplemented: `name` is not empty.
    """
    if name:
        raise Unimplemented("'repository_name' specification is not supported")
