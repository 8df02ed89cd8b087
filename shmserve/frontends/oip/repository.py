"""The model repository extension without a transport: index, load, unload."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec import Struct

from shmserve import ids
from shmserve.config import Settings
from shmserve.core.regions.region_book import Caller
from shmserve.errors import InvalidArgument, TooLarge, Unavailable, Unimplemented
from shmserve.frontends.access import Access
from shmserve.frontends.dispatch_api import DispatchApi
from shmserve.protocol.control.data_messages import Parameter

NOT_EXPLICIT = "explicit model load / unload is not allowed if polling is enabled"
_FILE = "file:"
_LONGEST_PATH = 1024
_DEEPEST = 8
_MAX_CONFIG = 1 << 20


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
            IndexRow(name, version, entry.state.value, entry.reason)
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
        self._check(name)
        if parameters and not self._access.open_to_all("send models"):
            self._access.check("send models", caller())
        config, files = self._overrides(name, parameters)
        self._dispatcher.coordinator.load_model(name, config, files)

    def unload(self, name: str, dependents: bool = False) -> None:
        """Serve a model no more; with `dependents` nor what was loaded as steps of it alone.

        Raises:
            ShmserveError: it was refused.
        """
        self._check(name)
        self._dispatcher.coordinator.unload_model(name, dependents)

    def _check(self, name: str) -> None:
        if self._settings.model_control != "explicit":
            raise Unavailable(NOT_EXPLICIT)
        if not name.strip():
            raise InvalidArgument(
                "Model name cannot be empty. Please enter a valid name to deploy."
            )
        if not ids.is_model_name(name):
            shown = ascii(name[:64])[1:-1]
            raise InvalidArgument(
                f"invalid model name '{shown}', model name must not contain path traversal"
                " characters: it is made of letters, digits and _ . + -"
            )

    def _overrides(
        self, name: str, parameters: Mapping[str, Parameter | bytes]
    ) -> tuple[str | None, dict[str, bytes]]:
        config: str | None = None
        files: dict[str, bytes] = {}
        for key, value in parameters.items():
            if key == "config":
                if not isinstance(value, str):
                    raise InvalidArgument("parameter 'config' must be a string of JSON")
                config = value
            elif key.startswith(_FILE):
                if not isinstance(value, bytes):
                    raise InvalidArgument(f"parameter '{_shown(key)}' must be the file's content")
                files[_path(key)] = value
            else:
                raise InvalidArgument(
                    f"unexpected parameter '{_shown(key)}': 'config' and 'file:<path>' are known"
                )
        if files and config is None:
            raise InvalidArgument(
                f"failed to load '{name}', override model directory requires its configuration:"
                " parameter 'config' is missing"
            )
        self._check_sizes(config or "", files)
        return config, files

    def _check_sizes(self, config: str, files: dict[str, bytes]) -> None:
        if len(config) > _MAX_CONFIG:
            raise TooLarge(f"parameter 'config' has more than {_MAX_CONFIG} characters")
        most = self._settings.max_override_files
        if len(files) > most:
            raise TooLarge(f"more than {most} files (max_override_files)")
        limit = self._settings.max_override_bytes
        if sum(map(len, files.values())) > limit:
            raise TooLarge(f"the files have more than {limit} bytes (max_override_bytes)")


def refuse_repository(name: str) -> None:
    """There is one repository, without a name.

    Raises:
        Unimplemented: one is named.
    """
    if name:
        raise Unimplemented("'repository_name' specification is not supported")


def _path(key: str) -> str:
    """The relative path a file override names, if it cannot lead out of the model's folder."""
    path = key.removeprefix(_FILE)
    parts = path.split("/")
    fine = len(path) <= _LONGEST_PATH and len(parts) <= _DEEPEST and path.isprintable()
    for part in parts:
        fine = fine and part not in ("", ".", "..") and len(part.encode()) <= 255
    if not fine or "\\" in path:
        raise InvalidArgument(
            f"Invalid file path '{_shown(key)}': the path of a file must be relative and stay"
            " inside the model's folder"
        )
    return path


def _shown(key: str) -> str:
    return ascii(key[:100])[1:-1]
