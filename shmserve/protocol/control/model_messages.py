"""Messages of model control, frontend <-> coordinator. `messages` has the unions."""

import msgspec

from shmserve.protocol.control.message import Message


class LoadModel(Message, frozen=True):
    """Request to load a model, or to load it again.

    `overrides` names a folder of the run directory (`transport.rundir.overrides`) with a
    configuration and files. The frontend has filled the folder and leaves it to the coordinator.
    Sent again to a new coordinator, the request joins the load that the former coordinator began.
    """

    ticket: int
    name: str
    overrides: str = ""


class UnloadModel(Message, frozen=True):
    """Request to serve a model no more. With `dependents`, models that were loaded only for this
    ensemble are unloaded, too."""

    ticket: int
    name: str
    dependents: bool = False


class ModelAnswer(Message, frozen=True):
    """Reply to `LoadModel` and `UnloadModel`, sent when the change is complete and published.
    `error_code` is empty on success."""

    ticket: int
    error_code: str = ""
    error: str = ""


class FetchModels(Message, frozen=True):
    """Order of the coordinator to the fetcher: bring models of remote repositories into the cache.
    `names`: models to fetch in their present state; "*": all. `keep`: snapshots that must stay,
    because executors run from them."""

    ticket: int
    names: tuple[str, ...]
    keep: tuple[str, ...] = ()


class ModelsFetched(Message, frozen=True):
    """Reply to `FetchModels`, sent when the fetch is complete or has failed. `problems`: by model,
    the reason why the cache does not hold the repository's present state. `unlisted`: reasons why
    repositories could not be listed."""

    ticket: int
    problems: dict[str, str] = msgspec.field(default_factory=dict)
    unlisted: tuple[str, ...] = ()
