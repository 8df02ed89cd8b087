"""The actors of the nodes, with stand-ins for Ray's calls."""

import pytest

from tests.servers import python

ACTORS = """
from types import SimpleNamespace
from shmserve.cluster import ray_nodes
from shmserve.cluster.cluster_file import ClusterSettings
from shmserve.errors import Unavailable
ray = ray_nodes.ray
class Method:
    def __init__(self, answer):
        self.answer = answer
    def remote(self, orders):
        return self.answer
def get(answer):
    if isinstance(answer, Exception):
        raise answer
    return answer
def failed(cause):
    return SimpleNamespace(update=Method(ray.exceptions.RayTaskError("update", "", cause)))
nodes = ray_nodes.RayNodes(ClusterSettings())
nodes._actors = actors = {
    "good": SimpleNamespace(update=Method("report")),
    "failing": failed(MemoryError()),
    "stopped": failed(Unavailable("the node's service was stopped")),
    "foreign": SimpleNamespace(),
}
alive = [{"NodeID": name, "Alive": True, "Resources": {}} for name in actors]
killed = []
ray.nodes, ray.kill, ray.get = lambda: alive, killed.append, get
ray.wait = lambda refs, num_returns, timeout: (refs, [])
for _ in range(2):
    print({name: report for name, report in nodes.update({}, 1.0).items() if report})
print(len(killed), sorted(nodes._actors), sorted(nodes._again_at))
"""


@pytest.mark.needs("ray")
def test_an_actor_that_was_stopped_or_is_foreign_is_killed_and_replaced_later() -> None:
    """One failed call costs no service."""
    said = python("-c", ACTORS).splitlines()
    assert said == ["{'good': 'report'}"] * 2 + ["2 ['failing', 'good'] ['foreign', 'stopped']"]
