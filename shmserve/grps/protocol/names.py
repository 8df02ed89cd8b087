"""Model names of GRPS clients, `name-version`, and the translation to names of the registry.

A GRPS version is any text, such as 1.0.0. The registry's versions are positive integers. The
parameter ``grps_version`` is the GRPS version of a model's newest version. Version n is also known
as n and n.0.0. A project is known by the names of its models.
"""

from shmserve.core.registry import ModelEntry, Snapshot
from shmserve.core.scheduling.ensemble_graph import PIPELINE
from shmserve.grps.protocol import model_parameters

VERSION = "grps_version"


class Names:
    """All names of a snapshot. `find` translates to name and version in the registry.

    Attributes:
        paths: models that have a path of their own on the HTTP server, by path.
        takes_http: a model in `paths` takes raw HTTP requests.
        default: model of requests without a name: the only model, or the only model that is
            configured for GRPS; empty: no such model exists.
    """

    def __init__(self, snapshot: Snapshot) -> None:
        self.snapshot = snapshot
        self._known: dict[str, tuple[str, str]] = {}
        entries = [e for versions in snapshot.models.values() for e in versions.values()]
        # Configured names take precedence over names that follow from numbers.
        for names in (_given, _implied):
            for each in entries:
                for name in names(each, snapshot):
                    self._known.setdefault(name, (each.spec.name, each.spec.version))
        models = [m for m in snapshot.models if not _is_pipeline(snapshot.newest(m))]
        if len(models) > 1:
            models = [m for m in models if _for_grps(snapshot.newest(m))]
        self.default = models[0] if len(models) == 1 else ""
        # If models want the same path, the first by name gets the path, in the newest ready
        # version.
        self.paths: dict[str, ModelEntry] = {}
        self.takes_http = False
        for model in sorted(snapshot.models):
            entry = snapshot.newest(model)
            path = entry.spec.parameters.get("grps_http_path") if entry is not None else None
            if entry is not None and path:
                self.paths.setdefault(path, entry)
                self.takes_http = self.takes_http or model_parameters.takes_http(entry.spec)

    def find(self, name: str) -> tuple[str, str] | None:
        """Return model and version in the registry for a client's name, None for an unknown one."""
        return self._known.get(name)


def versions_of(entry: ModelEntry, snapshot: Snapshot) -> list[str]:
    """Return the versions that clients may use for a model version, the preferred version first."""
    number = entry.spec.version
    configured = entry.spec.parameters.get(VERSION, "")
    applies = model_parameters.INFERENCE in entry.spec.parameters or _newest(entry, snapshot)
    return [*([configured] if configured and applies else []), f"{number}.0.0", number]


def _given(entry: ModelEntry, snapshot: Snapshot) -> list[str]:
    parts = entry.spec.parameters.get(model_parameters.MODELS, "")
    names = parts.split(",") if parts else []
    if _is_pipeline(entry):
        names.append(entry.spec.name)
    if len(versions_of(entry, snapshot)) > 2:
        names.append(f"{entry.spec.name}-{versions_of(entry, snapshot)[0]}")
    return names


def _implied(entry: ModelEntry, snapshot: Snapshot) -> list[str]:
    return [f"{entry.spec.name}-{version}" for version in versions_of(entry, snapshot)[-2:]]


def _for_grps(entry: ModelEntry | None) -> bool:
    return entry is not None and any(name.startswith("grps") for name in entry.spec.parameters)


def _is_pipeline(entry: ModelEntry | None) -> bool:
    return entry is not None and entry.spec.platform == PIPELINE


def _newest(entry: ModelEntry, snapshot: Snapshot) -> bool:
    versions = snapshot.models.get(entry.spec.name, {})
    return int(entry.spec.version) == max(map(int, versions), default=0)
