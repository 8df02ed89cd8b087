"""What `shmserve cluster` does, from outside of the actors: up, status, down."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import Any

from shmserve.cluster.cluster_file import ClusterFile, ClusterSettings
from shmserve.cluster.controller import Status
from shmserve.errors import ConfigError, Unavailable

_ANSWER_S = 30.0
_DOWN_MORE_S = 90.0
_POLL_S = 0.2


@contextlib.contextmanager
def _connected(settings: ClusterSettings) -> Iterator[Any]:
    """The module `ray_nodes`, while this process is a client of the cluster's Ray.

    Raises:
        ConfigError: the extra is missing.
        Unavailable: there is no Ray at that address.
    """
    try:
        import ray

        from shmserve.cluster import ray_nodes
    except ImportError as ex:
        raise ConfigError("Ray is missing here: pip install 'shmserve[ray]'") from ex
    if ray.is_initialized():  # by the program that calls this
        yield ray_nodes
        return
    try:
        ray.init(
            address=settings.ray_address,
            namespace=settings.name,
            log_to_driver=False,
            logging_level="ERROR",
        )
    except (ConnectionError, ValueError) as ex:
        reason = str(ex).splitlines()[0]
        raise Unavailable(f"no Ray at ray_address = {settings.ray_address}: {reason}") from ex
    try:
        with contextlib.redirect_stdout(sys.stderr):  # Ray tells of dead nodes where we print
            yield ray_nodes
    finally:
        ray.shutdown()


def _controller(ray_nodes: Any, name: str) -> Any:
    """Its handle. Raises Unavailable: none runs."""
    try:
        return ray_nodes.ray.get_actor(ray_nodes.CONTROLLER, name)
    except ValueError as ex:
        raise Unavailable(f"no cluster called {name} is up in this Ray") from ex


def _answer(ray_nodes: Any, ref: Any, timeout_s: float = _ANSWER_S) -> Any:
    """What the controller answers. Raises Unavailable: nothing, in this time."""
    errors = ray_nodes.ray.exceptions
    try:
        return ray_nodes.ray.get(ref, timeout=timeout_s)
    except (errors.ActorUnavailableError, errors.ActorDiedError, errors.GetTimeoutError) as ex:
        raise Unavailable(
            "the cluster's controller does not answer; Ray may start it again"
        ) from ex
    except errors.RayTaskError as ex:
        raise Unavailable(f"the cluster's controller failed: {ex.cause}") from ex


def up(file: ClusterFile) -> Status:
    """Start the cluster, or have the one that runs serve other models by other rules: a controller
    that knows them takes the place of the one before, and finds nodes and services as they are.

    Raises:
        ConfigError: what it says of nodes and their services differs from what runs.
        Unavailable: no Ray, or not every model had a replica in time.
    """
    with _connected(file.settings) as ray_nodes:
        with contextlib.suppress(Unavailable):
            _end_other(ray_nodes, file)
        deadline = time.monotonic() + file.settings.start_timeout_s
        actor = _begin(ray_nodes, file, deadline)
        while True:
            status: Status = _answer(ray_nodes, actor.status.remote())
            lacking = [name for name in file.models if not ready(status).get(name)]
            if not lacking:
                return status
            if time.monotonic() > deadline:
                raise Unavailable(_why(status, lacking))
            time.sleep(_POLL_S)


def _end_other(ray_nodes: Any, file: ClusterFile) -> None:
    """Raises Unavailable: there is none that could be asked."""
    actor = _controller(ray_nodes, file.settings.name)
    if not _answer(ray_nodes, actor.has_nodes_of.remote(file.settings)):
        raise ConfigError(
            "[service] or [nodes] differs from what runs: `shmserve cluster down` first"
        )
    ray_nodes.ray.kill(actor)


def _begin(ray_nodes: Any, file: ClusterFile, deadline: float) -> Any:
    """A controller's handle. Raises Unavailable: the one before does not go, or Ray has no head."""
    head = ray_nodes.at_the_head()
    while True:
        try:
            return ray_nodes.CONTROLLING.options(
                name=ray_nodes.CONTROLLER,
                namespace=file.settings.name,
                lifetime="detached",
                scheduling_strategy=head,
            ).remote(file)
        except ValueError as ex:  # its name is taken
            if time.monotonic() > deadline:
                raise Unavailable("another controller of this cluster does not end") from ex
            time.sleep(_POLL_S)


def ready(status: Status) -> dict[str, int]:
    """How many nodes have each model ready."""
    found: dict[str, int] = {}
    for report in status.nodes.values():
        for name in report.look.ready:
            found[name] = found.get(name, 0) + 1
    return found


def _why(status: Status, lacking: list[str]) -> str:
    reasons = [f"without a replica in start_timeout_s: {', '.join(lacking)}"]
    reasons += [
        f"node {node[:12]}: {report.problem}"
        for node, report in status.nodes.items()
        if report.problem
    ]
    return "\n".join(reasons)


def status(file: ClusterFile) -> Status:
    """How things are. Raises Unavailable: no Ray, or nothing is up."""
    with _connected(file.settings) as ray_nodes:
        found: Status = _answer(
            ray_nodes, _controller(ray_nodes, file.settings.name).status.remote()
        )
        return found


def down(file: ClusterFile) -> None:
    """End all services, their requests first.

    Raises:
        Unavailable: no Ray, nothing is up, or not all has ended: the controller is still there, so
            that this can be tried again.
    """
    with _connected(file.settings) as ray_nodes:
        actor = _controller(ray_nodes, file.settings.name)
        limit_s = file.settings.service_stop_timeout_s + file.settings.drain_s + _DOWN_MORE_S
        _answer(ray_nodes, actor.stop.remote(), limit_s)
        ray_nodes.ray.kill(actor)
