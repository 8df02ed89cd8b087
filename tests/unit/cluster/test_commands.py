"""Commands of a cluster, with a stand-in for Ray: who answers as the controller."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from shmserve.cluster import commands
from shmserve.cluster.controller import Status
from shmserve.errors import ConfigError, ShmserveError, Unavailable
from tests.servers import completed


class RayError(Exception):
    pass


class RayTaskError(RayError):
    cause = "the cause"


class TaskAttributeError(RayTaskError, AttributeError):
    """As Ray raises an AttributeError of the actor's own code."""


class GetTimeoutError(RayError):
    pass


class Method:
    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def remote(self) -> Any:
        return self._answer


def get(answer: Any, timeout: float) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


ERRORS = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)
RAY = SimpleNamespace(ray=SimpleNamespace(exceptions=ERRORS, get=get))


@pytest.mark.parametrize(
    ("actor", "kind", "told"),
    [
        (SimpleNamespace(), ConfigError, "is another program's"),
        (SimpleNamespace(status=Method({"nodes": 7})), ConfigError, "is another program's"),
        (SimpleNamespace(status=Method(TaskAttributeError())), Unavailable, "failed: the cause"),
        (SimpleNamespace(status=Method(GetTimeoutError())), Unavailable, "does not answer"),
        (SimpleNamespace(status=Method(RayError())), Unavailable, "does not answer"),
    ],
)
def test_an_answer_that_is_no_status_is_told_in_a_sentence(
    actor: Any, kind: type[ShmserveError], told: str
) -> None:
    with pytest.raises(kind, match=told):
        commands._status(RAY, actor)


def test_the_status_is_the_controllers() -> None:
    status = Status()
    assert commands._status(RAY, SimpleNamespace(status=Method(status))) is status


HANGS = """
import sys, time
from types import SimpleNamespace
from shmserve.cluster import commands
from shmserve.cluster.cluster_file import ClusterFile, ClusterSettings
commands._RAY_S = 0.2
def hang(*_, **__):
    time.sleep(60)
file = ClusterFile(ClusterSettings(ray_address="here:1"), {})
creator = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=hang))
class RayNodes:
    ray, CONTROLLER, CONTROLLING = SimpleNamespace(get_actor=hang), "controller", creator
    at_the_head = staticmethod(hang if sys.argv[1] == "head" else lambda: None)
if sys.argv[1] == "controller":
    commands._controller(RayNodes, file.settings)
else:
    commands._begin(RayNodes, file, 0.0)
"""


@pytest.mark.parametrize("what", ["controller", "head", "creation"])
def test_a_ray_that_hangs_ends_the_command(what: str) -> None:
    done = completed(sys.executable, "-c", HANGS, what)
    assert done.returncode == 2
    assert done.stderr == "shmserve: Ray at ray_address = here:1 does not answer within 0.2 s\n"
