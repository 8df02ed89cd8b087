"""Which models have lanes, and who may have how many. Pure."""

from __future__ import annotations

from msgspec import UNSET

from shmserve.config import Settings
from shmserve.core.registry import ModelEntry
from shmserve.errors import PermissionDenied, Unimplemented


def check_model(entry: ModelEntry, settings: Settings) -> None:
    """Let a model have lanes, or not: a lane goes to one executor and past all frontends, so what
    these do for a model must not be missed.

    Raises:
        PermissionDenied: inferences need a secret, which a lane does not ask for.
        Unimplemented: the model needs more than one of its executors, or is to be traced.
    """
    rules = (*settings.http_restricted_api, *settings.grpc_restricted_protocol)
    if any("inference" in rule.partition(":")[0] for rule in rules):
        raise PermissionDenied("inference is a restricted API, which has no lanes")
    obstacle = _obstacle(entry)
    if not settings.max_lanes:
        obstacle = "the server has no lanes (setting max_lanes)"
    if obstacle:
        raise Unimplemented(obstacle)


def _obstacle(entry: ModelEntry) -> str:
    spec, config = entry.spec, entry.spec.config
    name = f"model '{spec.name}'"
    if spec.steps:
        return f"{name} is an ensemble, which has no lanes"
    if config.sequence_batching is not UNSET:
        return f"{name} has sequences and no lanes"
    if spec.caches_answers:
        return f"{name} has its responses cached and no lanes"
    if any(group.rate_limiter is not UNSET for group in config.groups):
        return f"{name} has its rate limited and no lanes"
    if entry.trace is not None:
        return f"{name} is traced and has no lanes meanwhile"
    return ""


def most_of_one(settings: Settings) -> int:
    """How many lanes of one instance one user may have."""
    return max(1, int(settings.max_lanes * settings.max_caller_share))


def most_requests(settings: Settings, streams: bool) -> int:
    """How many requests of one user may be under way on an instance's lanes. Streams leave others
    their share of those that may be open."""
    if not streams:
        return settings.max_queue
    return min(settings.max_queue, max(1, int(settings.max_streams * settings.max_caller_share)))
