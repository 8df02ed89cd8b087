"""Free capacity of a host, as a weight for load balancers. Pure.

    weight = executors x min(queue, pool)

- executors: part of all instances that take requests;
- queue: of the most loaded model, 1 / (1 + waiting / (`HALVING` x instances)). So `HALVING`
  waiting requests per instance halve the weight; running requests do not count;
- pool: part of shared memory without tensors.

The queue term is no steeper for a reason: a host's weight falls because of its previous share.
With shares in proportion to weights (`leastconn`, `roundrobin`), a share too large by d is
followed by a share too small by less than d, for any queue length. So shares settle instead of
swinging (tests/property/test_free_capacity_properties.py).
"""

from collections.abc import Iterable

from msgspec import Struct

HALVING = 8  # waiting requests for each instance


class ModelLoad(Struct, frozen=True):
    """Load of a model version: intended instances, instances that take requests, and requests that
    wait for an instance."""

    wanted: int
    live: int
    waiting: int


def percent(models: Iterable[ModelLoad], pool_used: int, pool_bytes: int) -> int:
    """Return the weight of a ready host, 1 to 100. 0 would tell the load balancer to send nothing
    at all. `pool_used`: bytes of the pool with tensors. Made of hints that processes publish, so
    any number is accepted, also more than `pool_bytes`."""
    loads = [model for model in models if model.wanted > 0]
    wanted = sum(load.wanted for load in loads)
    live = sum(min(load.live, load.wanted) for load in loads)
    executors = live / wanted if wanted else 1.0
    queue = min((_queue(load) for load in loads), default=1.0)
    pool = 1 - min(max(pool_used, 0), pool_bytes) / pool_bytes if pool_bytes > 0 else 1.0
    return max(1, round(100 * executors * min(queue, pool)))


def _queue(load: ModelLoad) -> float:
    return 1 / (1 + max(load.waiting, 0) / (HALVING * max(load.live, 1)))
