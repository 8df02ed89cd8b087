"""Ray's part: an actor on each node that keeps its service, and one that runs the controller.

What goes through Ray are orders and reports, some hundred bytes a node and look.
"""

from __future__ import annotations

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
_NODE_NAME = "node-"  # and the node's: the name of its actor
ROOM_RESOURCE = "model_memory_mib"  # of `ray start --resources`: what models may take of a node
_HEAD = "node:__internal_head__"  # the resource that Ray gives it
_MIB = 1 << 20
_STOP_MORE_S = 20.0
_AGAIN_S = 10.0

_log = logging.getLogger(__name__)


class NodeActor:
    """The service of the node it is on. Ray starts it again if its process dies."""

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
    """An actor on each node that Ray knows, as the controller's nodes."""

    def __init__(self, settings: ClusterSettings) -> None:
        self._settings = settings
        self._actors: dict[str, Any] = {}
        self._asked: dict[str, Any] = {}  # one question at a time for each node
        self._again_at: dict[str, float] = {}  # until then no other actor for one that has died

    def update(
        self, orders: Mapping[str, frozenset[str]], timeout_s: float
    ) -> dict[str, NodeReport | None]:
        """See `controller.Nodes`."""
        self._follow_ray()
        for node, actor in self._actors.items():
            if node not in self._asked:
                self._asked[node] = actor.update.remote(orders.get(node))
        refs = list(self._asked.values())
        done = set(ray.wait(refs, num_returns=len(refs), timeout=timeout_s)[0]) if refs else set()
        reports: dict[str, NodeReport | None] = dict.fromkeys(self._actors)
        for node, ref in list(self._asked.items()):
            if ref in done:
                del self._asked[node]
                try:
                    reports[node] = ray.get(ref)
                except ray.exceptions.ActorDiedError as ex:
                    _log.warning("node %s: its actor cannot run: %s", node[:12], ex)
                    self._again_at[node] = time.monotonic() + _AGAIN_S
                    del self._actors[node]
                except ray.exceptions.RayError as ex:  # it is being started again
                    _log.debug("node %s: %s", node[:12], ex)
        return reports

    def stop(self) -> None:
        """See `controller.Nodes`. Also of nodes that this process has never looked at."""
        actors = self._named()
        ends = [actor.stop.remote() for actor in actors]
        timeout_s = self._settings.service_stop_timeout_s + _STOP_MORE_S
        late = ray.wait(ends, num_returns=len(ends), timeout=timeout_s)[1] if ends else []
        for actor in actors:  # late ones as well: their services get SIGTERM, and some have none
            ray.kill(actor)
        if late:
            raise Unavailable(
                f"{len(late)} of {len(ends)} nodes have not told in time of their end"
            )

    def _named(self) -> list[Any]:
        """The actors of this cluster's nodes that live, whoever has started them."""
        names = {_NODE_NAME + row["NodeID"] for row in ray.nodes() if row["Alive"]}
        actors = []
        for row in ray.util.list_named_actors(all_namespaces=True):
            if row["namespace"] == self._settings.name and row["name"] in names:
                with contextlib.suppress(ValueError):  # it has just ended
                    actors.append(ray.get_actor(row["name"], row["namespace"]))
        return actors

    def _follow_ray(self) -> None:
        """Actors for nodes that have come, none any more for those that went."""
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

    def _counts(self, resources: Mapping[str, float]) -> bool:
        return not self._settings.nodes_resource or self._settings.nodes_resource in resources

    def _actor(self, node: str, resources: Mapping[str, float]) -> Any:
        """The one that is there, or a new one. All GPUs of the node are its own."""
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
    """Where the controller runs: without the head's node there is no Ray at all. Raises
    Unavailable: there is none."""
    heads = [n["NodeID"] for n in ray.nodes() if n["Alive"] and _HEAD in n["Resources"]]
    if not heads:
        raise Unavailable("this Ray has no head's node that lives")
    return NodeAffinitySchedulingStrategy(heads[0], soft=False)


class ControllerActor:
    """The controller. Where its process dies, Ray starts another, which finds the nodes' actors."""

    def __init__(self, file: ClusterFile) -> None:
        logging.basicConfig(level=logging.INFO)
        self._settings = file.settings
        self._controller = Controller(file, RayNodes(file.settings))
        self._controller.start()

    def has_nodes_of(self, settings: ClusterSettings) -> bool:
        """Whether nodes and their services are as these settings have them."""
        return _of_nodes(settings) == _of_nodes(self._settings)

    def status(self) -> Status:
        return self._controller.status()

    def stop(self) -> None:
        self._controller.stop()


CONTROLLING: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=3)(ControllerActor)


def _of_nodes(settings: ClusterSettings) -> list[Any]:
    fields = settings.__struct_fields__
    return [getattr(settings, name) for name in fields if name.startswith(("service_", "nodes_"))]
