"""Hosts, models and requests, simulated with SimPy under the cluster's own policies.

Each tick the real `ClusterPlan` gets a report of every host, and its orders are carried out:
models load at the speed of a disk, and count against the host's memory meanwhile. Each request is
simulated: the balancer gives the request to a replica of the model, which works on one request
after the other.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field

import simpy

from shmserve.cluster.policies.cluster_plan import ClusterPlan, ModelRule
from shmserve.cluster.policies.measured_load import NodeLook, ReplicaCounts
from shmserve.cluster.policies.replica_scaling import ScalingRule
from shmserve.cluster.policies.traffic_weights import UNKNOWN

GIB = 1 << 30
BUCKET_S = 10.0  # of the time series


@dataclass(frozen=True)
class Assumptions:
    """Assumptions of the simulation. Sizes in GiB, times in seconds."""

    hosts: int = 1000
    models: int = 200
    seconds: float = 900.0
    seed: int = 1
    host_memory: float = 80.0
    model_memory: tuple[float, float] = (1.0, 40.0)  # log-uniform
    use: float = 0.5  # average use of all hosts' executors if every host had one replica
    popularity: float = 0.9  # exponent of Zipf's law
    run_s: float = 0.5  # mean of a run on a host of speed 1, exponentially distributed
    fast_share: float = 0.3  # share of hosts that are twice as fast
    load_gib_per_s: float = 2.0
    load_least_s: float = 5.0
    queue_s: float = 0.5  # the target of every model
    tick_s: float = 2.0
    ramp_s: float = 300.0  # from the first request to the full rate
    # waiting requests at a replica; further requests are refused, and come again
    max_queue: int = 64
    check_s: float = 2.0  # from a host's end until the balancer stops sending requests to the host
    notice_s: float = 10.0  # from a host's end until the cluster stops counting the host
    surge: tuple[float, float, float] = (400.0, 600.0, 2.0)  # from, to, factor: a tenth of models
    deaths: tuple[float, float] = (751.0, 0.04)  # when, and which share of hosts, at once
    balance: str = "weights"  # "weights": by speed, least connections; "even": the same for all


@dataclass
class Replica:
    """Replica of a model on a host: a queue before one executor."""

    host: Host
    loaded_at: float
    free_at: float = 0.0
    waiting: int = 0  # waiting and running requests
    requests: int = 0
    waited_s: float = 0.0
    busy_s: float = 0.0


@dataclass
class Host:
    name: str
    speed: float
    died_at: float = math.inf
    replicas: dict[str, Replica] = field(default_factory=dict)
    disk_free_at: float = 0.0

    @property
    def alive(self) -> bool:
        return self.died_at == math.inf


@dataclass
class Series:
    """Results of a run by bucket of time."""

    waits: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    replicas: list[tuple[float, int, int]] = field(default_factory=list)  # time, wanted, ready
    unserved: list[tuple[float, int]] = field(default_factory=list)
    step_s: list[float] = field(default_factory=list)
    loads: list[tuple[float, int]] = field(default_factory=list)
    over_memory: int = 0
    flaps: int = 0  # models loaded again on a host within a minute of leaving the host


class Simulation:
    """Run of the simulation. Equal assumptions give equal figures, except decision times."""

    def __init__(self, given: Assumptions) -> None:
        self.given = given
        self.series = Series()
        self._dice = random.Random(given.seed)
        self._env = simpy.Environment()
        self._hosts = [
            Host(f"h{i:04}", 2.0 if i < given.fast_share * given.hosts else 1.0)
            for i in range(given.hosts)
        ]
        self._by_name = {host.name: host for host in self._hosts}
        self._memory, self._rate = self._models()
        self._plan = ClusterPlan(
            {
                name: ModelRule(
                    round(memory * GIB),
                    ScalingRule(1, given.hosts, given.queue_s, up_s=2 * given.tick_s, down_s=120.0),
                )
                for name, memory in self._memory.items()
            }
        )
        self._routes: dict[str, dict[str, int]] = {}
        self._routable: dict[str, list[tuple[Replica, int]]] = {}
        self._left: dict[tuple[str, str], float] = {}

    def _models(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return the memory of each model, and the requests per second of each model."""
        given, low, high = self.given, *map(math.log, self.given.model_memory)
        names = [f"m{i:04}" for i in range(given.models)]
        memory = {name: math.exp(self._dice.uniform(low, high)) for name in names}
        shares = [1 / (rank + 1) ** given.popularity for rank in range(given.models)]
        speed = sum(host.speed for host in self._hosts)
        total = given.use * speed / given.run_s  # requests per second of all models
        return memory, {
            name: total * share / sum(shares) for name, share in zip(names, shares, strict=True)
        }

    def run(self) -> Series:
        self._env.process(self._control())
        self._env.process(self._misfortune())
        for number, name in enumerate(self._rate):
            self._env.process(self._arrivals(name, number % 10 == 0))
        self._env.run(until=self.given.seconds)
        return self.series

    # ---------------------------------------------------------------- requests

    def _arrivals(self, model: str, surges: bool):
        """Generate the requests of one model at random times. Requests before the model's first
        replica are not sent, so the results begin with a cluster that has started."""
        begin, end, factor = self.given.surge
        while not self._routable.get(model):
            yield self._env.timeout(1.0)
        while True:
            more = factor if surges and begin <= self._env.now < end else 1.0
            yield self._env.timeout(self._dice.expovariate(self._rate[model] * more))
            if self._dice.random() * self.given.ramp_s < self._env.now:
                self._send(model, self._env.now)

    def _send(self, model: str, came: float) -> None:
        bucket = int(self._env.now / BUCKET_S)
        choices = self._routable.get(model, [])
        if not choices:
            self.series.counts["refused", bucket] += 1
            self._again(model, came, 0.5)
            return
        replica, _ = min(choices, key=lambda pair: (pair[0].waiting + 1) / pair[1])
        if not replica.host.alive:  # the balancer does not know yet: no connection
            self.series.counts["retried", bucket] += 1
            self._again(model, came, 0.05)
            return
        if replica.waiting >= self.given.max_queue:
            self.series.counts["refused", bucket] += 1
            self._again(model, came, 1.0)
            return
        now = self._env.now
        run_s = self._dice.expovariate(replica.host.speed / self.given.run_s)
        wait_s = max(0.0, replica.free_at - now)
        replica.free_at = max(now, replica.free_at) + run_s
        replica.waiting += 1
        self.series.counts["sent", bucket] += 1
        done = self._env.timeout(wait_s + run_s)
        done.callbacks.append(lambda _: self._answered(model, replica, came, wait_s, run_s))

    def _again(self, model: str, came: float, after_s: float) -> None:
        self._env.timeout(after_s).callbacks.append(lambda _: self._send(model, came))

    def _answered(
        self, model: str, replica: Replica, came: float, wait_s: float, run_s: float
    ) -> None:
        bucket = int(self._env.now / BUCKET_S)
        if not replica.host.alive:
            self.series.counts["broken off", bucket] += 1
            self._send(model, came)
            return
        replica.waiting -= 1
        replica.requests += 1
        replica.waited_s += wait_s
        replica.busy_s += run_s
        self.series.counts["answered", bucket] += 1
        self.series.waits[bucket].append(self._env.now - came - run_s)

    # ---------------------------------------------------------------- control

    def _control(self):
        while True:
            now = self._env.now
            there = [h for h in self._hosts if now - self.given.notice_s < h.died_at]
            looks = {host.name: self._look(host) for host in there}
            begun = time.perf_counter()
            decision = self._plan.step(self._env.now, looks)
            self.series.step_s.append(time.perf_counter() - begun)
            for name, models in decision.orders.items():
                self._obey(self._by_name[name], models)
            self._routes = decision.routes
            self._route()
            ready = sum(len(look.ready) for look in looks.values())
            served = {name for host in there if host.alive for name in looks[host.name].ready}
            self.series.replicas.append((self._env.now, sum(decision.replicas.values()), ready))
            self.series.unserved.append((self._env.now, len(self._memory) - len(served)))
            yield self._env.timeout(self.given.tick_s)

    def _look(self, host: Host) -> NodeLook:
        now = self._env.now
        ready = {name for name, replica in host.replicas.items() if replica.loaded_at <= now}
        counts = {
            name: ReplicaCounts(r.requests, r.waited_s, r.busy_s)
            for name, r in host.replicas.items()
        }
        room = round(self.given.host_memory * GIB)
        return NodeLook(room, frozenset(host.replicas), frozenset(ready), {}, counts)

    def _obey(self, host: Host, models: frozenset[str]) -> None:
        now = self._env.now
        for name in host.replicas.keys() - models:
            del host.replicas[name]
            self._left[host.name, name] = now
        for name in sorted(models - host.replicas.keys()):
            takes = max(self.given.load_least_s, self._memory[name] / self.given.load_gib_per_s)
            host.disk_free_at = max(now, host.disk_free_at) + takes
            host.replicas[name] = Replica(host, host.disk_free_at)
            self.series.loads.append((now, 1))
            if now - self._left.get((host.name, name), -math.inf) < 60:
                self.series.flaps += 1
        used = sum(self._memory[name] for name in host.replicas)
        self.series.over_memory += used > self.given.host_memory + 1e-6

    def _route(self) -> None:
        """Set the balancer's routes from its orders; hosts that do not answer checks drop out
        without an order."""
        seen = self._env.now - self.given.check_s
        even = self.given.balance == "even"
        self._routable = {
            model: [
                (self._by_name[name].replicas[model], UNKNOWN if even else weight)
                for name, weight in weights.items()
                if model in self._by_name[name].replicas and self._by_name[name].died_at > seen
            ]
            for model, weights in self._routes.items()
        }

    def _misfortune(self):
        at, share = self.given.deaths
        yield self._env.timeout(at)
        for host in self._dice.sample(self._hosts, round(share * len(self._hosts))):
            host.died_at = self._env.now
        yield self._env.timeout(self.given.check_s)
        self._route()
