"""How much of a host is free, as the weight that a load balancer gives it. Pure.

    weight = executors x min(queue, pool)

- executors: the part of all instances that take requests;
- queue: of the model that is worst off, 1 / (1 + waiting / (`HALVING` x instances)): `HALVING`
  requests that wait for each instance halve it; those that models work on do not count;
- pool: the part of shared memory in which no tensors are.

Why the queue has this form and no steeper one: a host's weight falls because of the share it was
given before. With shares in proportion to weights, as `leastconn` and `roundrobin` make them, one
that is too large by d is followed by one that is too small by less than d, however long the queues
are, so shares settle instead of swinging (tests/property/test_free_capacity_properties.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

HALVING = 8  # requests that wait for each instance


class ModelLoad(Struct, frozen=True):
    """A model version: instances that there should be, those that take requests, and the requests
    that wait for them."""

    wanted: int
    live: int
    waiting: int


def percent(models: Iterable[ModelLoad], pool_used: int, pool_bytes: int) -> int:
    """The weight of a host that is ready: 1 to 100. 0 would mean that it takes nothing at all.

    `pool_used`: bytes of the pool in which there are tensors; may be more than `pool_bytes`, or any
    number else: it is made of hints that processes publish.
    """
    loads = [model for model in models if model.wanted > 0]
    wanted = sum(load.wanted for load in loads)
    live = sum(min(load.live, load.wanted) for load in loads)
    executors = live / wanted if wanted else 1.0
    queue = min((_queue(load) for load in loads), default=1.0)
    pool = 1 - min(max(pool_used, 0), pool_bytes) / pool_bytes if pool_bytes > 0 else 1.0
    return max(1, round(100 * executors * min(queue, pool)))


def _queue(load: ModelLoad) -> float:
    return 1 / (1 + max(load.waiting, 0) / (HALVING * max(load.live, 1)))
