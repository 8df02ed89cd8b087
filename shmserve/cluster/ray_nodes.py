"""Ray actors: on each node an actor for the node's service, on the head node the controller's
actor. Ray carries orders and reports, some hundred bytes per node and round."""

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from shmserve.cluster.cluster_file import ClusterFile, ClusterSettings
from shmserve.cluster.controller import Controller, Status
from shmserve.cluster.node_service import NodeReport, NodeService
from shmserve.errors import Unavailable
from shmserve.observe import gpu_use

CONTROLLER = "controller"
_NODE_NAME = "node-"  # prefix of an actor's name, before the node's id
ROOM_RESOURCE = "model_memory_mib"  # key in `ray start --resources`: memory of the node for models
_HEAD = "node:__internal_head__"  # resource that Ray gives the head node
_MIB = 1 << 20
_STOP_MORE_S = 20.0
_AGAIN_S = 10.0

_log = logging.getLogger(__name__)


class NodeActor:
    """Actor that runs the service of a node. Ray restarts the actor if the process dies."""

    def __init__(self, settings: ClusterSettings, room: int) -> None:
        logging.basicConfig(level=logging.INFO)
        node = ray.get_runtime_context().get_node_id()
        base = settings.service_run_dir or tempfile.gettempdir()
        self._service = NodeService(
            settings,
            ray.util.get_node_ip_address(),
            room or gpu_use.least_memory(),
            os.path.join(base, f"{settings.name}-{node[:12]}"),
        )

    def update(self, orders: frozenset[str] | None) -> NodeReport:
        return self._service.update(orders)

    def stop(self) -> None:
        self._service.stop()


_NODE: Any = ray.remote(num_cpus=0, max_restarts=-1)(NodeActor)


class RayNodes:
    """Nodes known to Ray, with an actor on each; implements `controller.Nodes`."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._actors: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}  # unanswered `update` calls, at most one per node
        # time before which a dead actor is not replaced, by node
        self._again_at: dict[str, float] = {}

    def update(
        self, orders: Mapping[str, frozenset[str]], timeout_s: float
    ) -> dict[str, NodeReport | None]:
        """Send orders and collect reports, as `controller.Nodes.update`."""
        self._follow_ray()
        for node, actor in list(self._actors.items()):
            if node not in self._asked:
                try:
                    self._asked[node] = actor.update.remote(orders.get(node))
                except AttributeError:  # another program's actor has the name
                    self._replace(node, "its actor is no NodeActor")
        refs = list(self._asked.values())
        done = set(ray.wait(refs, num_returns=len(refs), timeout=timeout_s)[0]) if refs else set()
        reports: dict[str, NodeReport | None] = dict.fromkeys(self._actors)
        for node, ref in list(self._asked.items()):
            if ref in done:
                del self._asked[node]
                try:
                    reports[node] = ray.get(ref)
                except ray.exceptions.RayError as ex:
                    stopped = isinstance(getattr(ex, "cause", None), Unavailable)
                    if stopped or isinstance(ex, ray.exceptions.ActorDiedError):
                        self._replace(node, f"its actor cannot run: {ex}")
                    else:  # Ray is restarting the actor, or a call failed: the service may run on
                        _log.debug("node %s: %s", node[:12], ex)
        return reports

    def stop(self) -> None:
        """End all services, as `controller.Nodes.stop`, also on nodes unknown to this process."""
        actors = self._named()
        ends = [actor.stop.remote() for actor in actors]
        timeout_s = self._settings.service_stop_timeout_s + _STOP_MORE_S
        late = ray.wait(ends, num_returns=len(ends), timeout=timeout_s)[1] if ends else []
        # Kill late actors too: killing an actor sends SIGTERM to the service, if the actor runs
        # one.
        for actor in actors:
            ray.kill(actor)
        if late:
            raise Unavailable(f"{len(late)} of {len(ends)} nodes did not report their end in time")

    def _named(self) -> list[Any]:
        """Return the live actors of the cluster's nodes, also of other processes."""
        names = {_NODE_NAME + row["NodeID"] for row in ray.nodes() if row["Alive"]}
        actors = []
        for row in ray.util.list_named_actors(all_namespaces=True):
            if row["namespace"] == self._settings.name and row["name"] in names:
                with contextlib.suppress(ValueError):  # the actor has just ended
                    actors.append(ray.get_actor(row["name"], row["namespace"]))
        return actors

    def _follow_ray(self) -> None:
        """Start actors on new nodes, and kill the actors of nodes that have gone."""
        alive = {
            row["NodeID"]: row["Resources"]
            for row in ray.nodes()
            if row["Alive"] and self._counts(row["Resources"])
        }
        for node, resources in alive.items():
            if node not in self._actors and time.monotonic() >= self._again_at.get(node, 0.0):
                self._actors[node] = self._actor(node, resources)
        for node in self._actors.keys() - alive.keys():
            self._asked.pop(node, None)
            self._again_at.pop(node, None)
            with contextlib.suppress(ray.exceptions.RayError):
                ray.kill(self._actors.pop(node))

    def _replace(self, node: str, reason: str) -> None:
        """Kill a node's actor, and start another one a little later."""
        _log.warning("node %s: %s", node[:12], reason)
        self._again_at[node] = time.monotonic() + _AGAIN_S
        with contextlib.suppress(ray.exceptions.RayError):
            ray.kill(self._actors.pop(node))

    def _counts(self, resources: Mapping[str, float]) -> bool:
        return not self._settings.nodes_resource or self._settings.nodes_resource in resources

    def _actor(self, node: str, resources: Mapping[str, float]) -> Any:
        """Return the node's actor, started if needed. The actor reserves all GPUs."""
        room = self._settings.nodes_room_bytes or int(resources.get(ROOM_RESOURCE, 0)) * _MIB
        if not room and not resources.get("GPU"):
            room = int(resources.get("memory", 0))
        return _NODE.options(
            name=_NODE_NAME + node,
            namespace=self._settings.name,
            lifetime="detached",
            get_if_exists=True,
            num_gpus=resources.get("GPU", 0),
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
        ).remote(self._settings, room)


def at_the_head() -> NodeAffinitySchedulingStrategy:
    """Return the scheduling strategy for the controller: the head node, because Ray cannot run
    without a head node. Raise Unavailable if no head node is alive."""
    heads = [n["NodeID"] for n in ray.nodes() if n["Alive"] and _HEAD in n["Resources"]]
    if not heads:
        raise Unavailable("this Ray has no living head node")
    return NodeAffinitySchedulingStrategy(heads[0], soft=False)


class ControllerActor:
    """Actor that runs the controller. If the process dies, Ray starts another, which finds the
    actors of the nodes."""

    def __init__(self, file: ClusterFile) -> None:
        logging.basicConfig(level=logging.INFO)
        self._settings = file.settings
        self._controller = Controller(file, RayNodes(file.settings))
        self._controller.start()

    def has_nodes_of(self, settings: ClusterSettings) -> bool:
        """Return True if `settings` ask for the running nodes and services, False if any setting
        of nodes or services differs."""
        return _of_nodes(settings) == _of_nodes(self._settings)

    def status(self) -> Status:
        return self._controller.status()

    def stop(self) -> None:
        self._controller.stop()


CONTROLLING: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=3)(ControllerActor)


def _of_nodes(settings: ClusterSettings) -> list[Any]:
    fields = settings.__struct_fields__
    return [getattr(settings, name) for name in fields if name.startswith(("service_", "nodes_"))]
