"""The model repository extension without a transport: index, load, unload."""

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
    """One version of a model; of one that was never loaded, only the name."""

    name: str
    version: str = ""
    state: str = ""
    reason: str = ""


class Repository:
    """Lists, loads and unloads models for any transport. One per process."""

    def __init__(self, dispatcher: DispatchApi, settings: Settings, access: Access) -> None:
        self._dispatcher = dispatcher
        self._access = access
        self._settings = settings

    def index(self, ready_only: bool = False) -> list[IndexRow]:
        """Every version of every model, by name."""
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
            known = {row.name for row in rows}
            rows += [
                IndexRow(n) for n in self._dispatcher.coordinator.model_folders() if n not in known
            ]
        return sorted(rows, key=lambda row: (row.name, len(row.version), row.version))

    def load(
        self,
        name: str,
        parameters: Mapping[str, Parameter | bytes],
        caller: Callable[[], Caller],
    ) -> None:
        """Load a model, or load it again; returns when it serves.

        Args:
            name: the model.
            parameters: ``config``, a configuration as JSON, and ``file:<path>``, the
                content of a file; with files the model is made of nothing else.
            caller: who asks; looked up only if it matters.

        Raises:
            ShmserveError: it was refused, or the model cannot be loaded.
        """
        load_request.check_name(name, self._settings)
        if parameters and not self._access.open_to_all("send models"):
            self._access.check("send models", caller())
        config, files = load_request.overrides(name, parameters, self._settings)
        self._dispatcher.coordinator.load_model(name, config, files)

    def unload(self, name: str, dependents: bool = False) -> None:
        """Serve a model no more; with `dependents` nor what was loaded as steps of it alone.

        Raises:
            ShmserveError: it was refused.
        """
        load_request.check_name(name, self._settings)
        self._dispatcher.coordinator.unload_model(name, dependents)


def refuse_repository(name: str) -> None:
    """There is one repository, without a name.

    Raises:
        Unimplemented: one is named.
    """
    if name:
        raise Unimplemented("'repository_name' specification is not supported")
