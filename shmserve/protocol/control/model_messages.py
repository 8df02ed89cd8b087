"""Messages of model control, frontend <-> coordinator; `messages` has their unions."""

from __future__ import annotations

import msgspec

from shmserve.protocol.control.message import Message


class LoadModel(Message, frozen=True):
    """Load a model, or load it again.

    `overrides` names a folder of the run directory (`transport.rundir.overrides`) that the
    asker has filled with a configuration and files and now leaves to the coordinator. Asked
    again of a coordinator's successor, it joins what its predecessor began.
    """

    ticket: int
    name: str
    overrides: str = ""


class UnloadModel(Message, frozen=True):
    """Serve a model no more. `dependents`: nor the models of an ensemble that were loaded for it
    alone."""

    ticket: int
    name: str
    dependents: bool = False


class ModelAnswer(Message, frozen=True):
    """Reply to both, when all is done and published; `error_code` is empty if it went well."""

    ticket: int
    error_code: str = ""
    error: str = ""


class FetchModels(Message, frozen=True):
    """Coordinator -> fetcher: have these models ("*": all) of the remote repositories in the cache,
    as they are there now. `keep`: snapshots that must stay, because executors run from them."""

    ticket: int
    names: tuple[str, ...]
    keep: tuple[str, ...] = ()


class ModelsFetched(Message, frozen=True):
    """Reply, when that is done or has failed. `problems`: model -> why the cache has not what its
    repository has now; `unlisted`: why repositories could not be looked at."""

    ticket: int
    problems: dict[str, str] = msgspec.field(default_factory=dict)
    unlisted: tuple[str, ...] = ()
