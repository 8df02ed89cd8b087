"""Lane rules: which models have lanes, and how many lanes a user may have. Pure."""

from __future__ import annotations

from msgspec import UNSET

from shmserve.config import Settings
from shmserve.core.registry import ModelEntry
from shmserve.errors import PermissionDenied, Unimplemented


def check_model(entry: ModelEntry, settings: Settings) -> None:
    """Check that a model may have lanes. A lane leads to one executor and bypasses all frontends,
    so the model must not depend on work done by frontends.

    Raises:
        PermissionDenied: inference needs a secret, which a lane does not check.
        Unimplemented: the server has no lanes, or the model is an ensemble, has sequences, cached
            responses or rate limits, or is traced.
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
        return f"{name} has sequences, and therefore no lanes"
    if spec.caches_answers:
        return f"{name} has a response cache, and therefore no lanes"
    if any(group.rate_limiter is not UNSET for group in config.groups):
        return f"{name} has a rate limiter, and therefore no lanes"
    if entry.trace is not None:
        return f"{name} has no lanes while it is traced"
    return ""


def most_of_one(settings: Settings) -> int:
    """Return the limit of lanes per user and instance."""
    return max(1, int(settings.max_lanes * settings.max_caller_share))


def most_requests(settings: Settings, streams: bool) -> int:
    """Return the limit of concurrent requests per user on an instance's lanes. The limit for
    streams leaves other users their share of the open streams."""
    if not streams:
        return settings.max_queue
    return min(settings.max_queue, max(1, int(settings.max_streams * settings.max_caller_share)))
