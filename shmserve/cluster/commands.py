"""Commands of `shmserve cluster`: up, status, down. They run outside of the actors."""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

from shmserve.cluster.cluster_file import ClusterFile, ClusterSettings
from shmserve.cluster.controller import Status
from shmserve.errors import ConfigError, Unavailable

_ANSWER_S = 30.0
_DOWN_MORE_S = 90.0
_POLL_S = 0.2
_RAY_S = 60.0  # for Ray to take this program in
_FOREIGN = (
    "name: the actor controller in this namespace of Ray is another program's; end it, or give the"
    " cluster another name"
)


@contextlib.contextmanager
def _answering(address: str) -> Iterator[None]:
    """End this program if Ray does not answer: calls to a head that hangs, without a timeout of
    their own, wait without end, and cannot be interrupted."""
    timer = threading.Timer(_RAY_S, _give_up, (address,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _give_up(address: str) -> None:
    text = f"shmserve: Ray at ray_address = {address} does not answer within {_RAY_S:g} s\n"
    os.write(sys.stderr.fileno(), text.encode())
    os._exit(2)


@contextlib.contextmanager
def _connected(settings: ClusterSettings) -> Iterator[Any]:
    """Yield the module `ray_nodes` while this process is a client of the cluster's Ray."""
    try:
        import ray

        from shmserve.cluster import ray_nodes
    except ImportError as ex:
        raise ConfigError("Ray is missing here: pip install 'shmserve[ray]'") from ex
    if ray.is_initialized():  # by the calling program
        yield ray_nodes
        return
    try:
        with _answering(settings.ray_address):
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
        # Ray prints messages about dead nodes to stdout
        with contextlib.redirect_stdout(sys.stderr):
            yield ray_nodes
    finally:
        ray.shutdown()


def _controller(ray_nodes: Any, settings: ClusterSettings) -> Any:
    """Return the handle of the running controller. Raise Unavailable if none runs."""
    try:
        with _answering(settings.ray_address):
            return ray_nodes.ray.get_actor(ray_nodes.CONTROLLER, settings.name)
    except ValueError as ex:
        raise Unavailable(f"no cluster called {settings.name} is up in this Ray") from ex


def _ask(
    ray_nodes: Any, actor: Any, method: str, *words: object, timeout_s: float = _ANSWER_S
) -> Any:
    """Return the controller's answer. Raise Unavailable if late, or after a failure. Raise
    ConfigError if another program of this Ray has the controller's name."""
    errors = ray_nodes.ray.exceptions
    try:
        return ray_nodes.ray.get(getattr(actor, method).remote(*words), timeout=timeout_s)
    except errors.RayTaskError as ex:
        raise Unavailable(f"the cluster's controller failed: {ex.cause}") from ex
    except AttributeError:
        raise ConfigError(_FOREIGN) from None
    except errors.RayError as ex:  # also GetTimeoutError
        raise Unavailable(
            "the cluster's controller does not answer; Ray may start it again"
        ) from ex


def _status(ray_nodes: Any, actor: Any, timeout_s: float = _ANSWER_S) -> Status:
    """Return the controller's status; raises as `_ask`."""
    status = _ask(ray_nodes, actor, "status", timeout_s=timeout_s)
    if not isinstance(status, Status):
        raise ConfigError(_FOREIGN)
    return status


def up(file: ClusterFile) -> Status:
    """Start the cluster, or change the models and rules of a running cluster. A new controller then
    replaces the old one, and finds nodes and services as they are. Raise ConfigError if the
    settings of nodes or services differ from the running cluster's. Raise Unavailable if there is
    no Ray, or some model had no replica in time."""
    with _connected(file.settings) as ray_nodes:
        with contextlib.suppress(Unavailable):
            _end_other(ray_nodes, file)
        deadline = time.monotonic() + file.settings.start_timeout_s
        actor = _begin(ray_nodes, file, deadline)
        while True:
            # The first answer comes after Ray has started the controller's process
            remaining_s = max(_ANSWER_S, deadline - time.monotonic())
            status = _status(ray_nodes, actor, remaining_s)
            lacking = [name for name in file.models if not ready(status).get(name)]
            if not lacking:
                return status
            if time.monotonic() > deadline:
                raise Unavailable(_why(status, lacking))
            time.sleep(_POLL_S)


def _end_other(ray_nodes: Any, file: ClusterFile) -> None:
    """Kill the running controller. Raise Unavailable if none runs or none answers, ConfigError if
    its settings of nodes or services differ."""
    actor = _controller(ray_nodes, file.settings)
    if not _ask(ray_nodes, actor, "has_nodes_of", file.settings):
        raise ConfigError(
            "[service] or [nodes] differs from the running cluster: `shmserve cluster down` first"
        )
    ray_nodes.ray.kill(actor)


def _begin(ray_nodes: Any, file: ClusterFile, deadline: float) -> Any:
    """Start a controller and return its handle. Raise Unavailable if the previous controller does
    not end, or Ray has no head node."""
    with _answering(file.settings.ray_address):
        head = ray_nodes.at_the_head()
    controlling = ray_nodes.CONTROLLING.options(
        name=ray_nodes.CONTROLLER,
        namespace=file.settings.name,
        lifetime="detached",
        scheduling_strategy=head,
    )
    while True:
        try:
            with _answering(file.settings.ray_address):
                return controlling.remote(file)
        except ValueError as ex:  # the name is taken
            if time.monotonic() > deadline:
                raise Unavailable("another controller of this cluster does not end") from ex
            time.sleep(_POLL_S)


def ready(status: Status) -> dict[str, int]:
    """Return the number of nodes on which each model is ready."""
    counts: dict[str, int] = {}
    for report in status.nodes.values():
        for name in report.look.ready:
            counts[name] = counts.get(name, 0) + 1
    return counts


def _why(status: Status, lacking: list[str]) -> str:
    reasons = [f"without a replica in start_timeout_s: {', '.join(lacking)}"]
    reasons += [
        f"node {node[:12]}: {report.problem}"
        for node, report in status.nodes.items()
        if report.problem
    ]
    return "\n".join(reasons)


def status(file: ClusterFile) -> Status:
    """Return the status of the cluster. Raise Unavailable if no Ray or no cluster is up."""
    with _connected(file.settings) as ray_nodes:
        return _status(ray_nodes, _controller(ray_nodes, file.settings))


def down(file: ClusterFile) -> None:
    """End all services after their running requests. Raise Unavailable if there is no Ray, no
    cluster is up, or some services have not ended. The controller then still runs, so `down` can be
    repeated."""
    with _connected(file.settings) as ray_nodes:
        actor = _controller(ray_nodes, file.settings)
        limit_s = file.settings.service_stop_timeout_s + file.settings.drain_s + _DOWN_MORE_S
        _ask(ray_nodes, actor, "stop", timeout_s=limit_s)
        ray_nodes.ray.kill(actor)
