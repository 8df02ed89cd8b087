"""The drill: HAProxy before three services, under load, while things befall them.

    python -m tests.balance.drill

What is shown of each trial: requests sent, answered, sent to another host by HAProxy, ended with a
clear error, and lost (neither); requests that a model ran twice; how long HAProxy took to notice;
the longest time without any answer.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from shmserve.testing.running_server import wait_until
from tests.balance.hosts import BACKENDS, NAMES, Balancer, Host, network, slow
from tests.balance.load import Load, Tally
from tests.needs import ip


@dataclass
class Trial:
    """What a trial has shown; `times`: what took how long, in seconds."""

    name: str
    tally: Tally
    times: dict[str, float]

    def __str__(self) -> str:
        times = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in self.times.items())
        return f"{self.name}: {self.tally.line()}; {times or 'nothing to notice'}"


@dataclass
class Drill:
    """The trials, one after the other; `settle_s`: of load before and after what befalls."""

    balancer: Balancer
    hosts: list[Host]
    load: Load
    folder: str
    settle_s: float
    trials: dict[str, Trial] = field(default_factory=dict)

    def run(self, name: str, trial: Callable[[dict[str, float]], None]) -> Trial:
        """One trial, which notes its times."""
        times: dict[str, float] = {}
        again, began = self.load.redispatched(), time.monotonic()
        time.sleep(self.settle_s / 2)
        trial(times)
        time.sleep(self.settle_s)
        tally = self.load.tally(began, time.monotonic(), self.load.redispatched() - again)
        self.trials[name] = made = Trial(name, tally, times)
        print(made, flush=True)
        return made

    # ------------------------------------------------------------- trials

    def steady(self, times: dict[str, float]) -> None:
        """Nothing befalls anybody."""

    def slowness(self, times: dict[str, float]) -> None:
        """A host takes fifteen times as long for each request."""
        with slow(self.folder, NAMES[0]) as began:
            self.wait(lambda: self.weight(NAMES[0]) < 100, "its weight falls", began, times)
            time.sleep(self.settle_s)
            ended = time.monotonic()
            shares = self.load.tally(ended - self.settle_s, ended, 0).hosts
            times["(its part of the answers)"] = shares[NAMES[0]] / max(1, shares.total())
        self.wait(lambda: self.weight(NAMES[0]) == 100, "as before", time.monotonic(), times)

    def hang(self, times: dict[str, float]) -> None:
        """Every process of a host is stopped, and goes on later."""
        host, began = self.hosts[2], time.monotonic()
        host.signal_all(signal.SIGSTOP)
        try:
            self.wait(lambda: self.state(host) == "DOWN", "noticed", began, times)
            time.sleep(self.settle_s)
        finally:
            host.signal_all(signal.SIGCONT)
        self.wait(lambda: self.state(host) == "UP", "back", time.monotonic(), times)

    def unplugged(self, times: dict[str, float]) -> None:
        """The cable of a host is pulled, and plugged in again."""
        host, began = self.hosts[2], time.monotonic()
        assert ip("-n", self.balancer.namespace, "link", "set", host.name, "down")
        self.wait(lambda: self.state(host) == "DOWN", "noticed", began, times)
        time.sleep(self.settle_s)
        assert ip("-n", self.balancer.namespace, "link", "set", host.name, "up")
        self.wait(lambda: self.state(host) == "UP", "back", time.monotonic(), times)

    def rolling(self, times: dict[str, float]) -> None:
        """Each host in turn: drain it in HAProxy, restart it, let it come back."""
        for host in self.hosts:
            began = time.monotonic()
            self.balancer.set(host.name, "drain")
            self.balancer.wait_idle(host.name)
            times[f"{host.name} idle"] = time.monotonic() - began
            host.stop()
            host.start()
            self.wait(lambda: self.checked(host.name), f"{host.name} back", began, times)  # noqa: B023
            self.balancer.set(host.name, "ready")
            self.balancer.wait_state(host.name, "UP")

    def plain_restart(self, times: dict[str, float]) -> None:
        """A host is restarted, and nobody has told HAProxy."""
        host, began = self.hosts[0], time.monotonic()
        host.stop()
        host.start()
        self.wait(lambda: self.state(host) == "UP", "back", began, times)

    def death(self, times: dict[str, float]) -> None:
        """Every process of a host is killed at once."""
        host, began = self.hosts[1], time.monotonic()
        host.kill()
        self.wait(lambda: self.state(host) == "DOWN", "noticed", began, times)

    def birth(self, times: dict[str, float]) -> None:
        """A host that has died is started again."""
        host, began = self.hosts[1], time.monotonic()
        host.start()
        times["ready"] = time.monotonic() - began
        self.wait(lambda: self.state(host) == "UP", "noticed", began, times)

    # -------------------------------------------------------------- watching

    def wait(
        self, seen: Callable[[], bool], what: str, began: float, times: dict[str, float]
    ) -> None:
        wait_until(seen, what)
        times[what] = time.monotonic() - began

    def state(self, host: Host) -> str:
        return self.balancer.states()[host.name]

    def weight(self, name: str) -> int:
        """As the host's agent has told HAProxy last, of 100."""
        return int(self.balancer.table()[BACKENDS[0], name]["weight"])

    def checked(self, name: str) -> bool:
        """Whether both health checks of a host that is being drained succeed."""
        table = self.balancer.table()
        rows = [table[backend, name] for backend in BACKENDS]
        return all(row["check_status"] == "L7OK" and row["status"] == "DRAIN" for row in rows)


def problems(drill: Drill) -> list[str]:
    """What must not be: no answer, a second run, and errors where there need be none."""
    found = []
    for trial in drill.trials.values():
        found += [f"{trial.name}: {lost}" for lost in trial.tally.lost]
        found += [f"{trial.name}: request {n} ran twice" for n in trial.tally.twice]
        if trial.name in ("steady", "slow", "rolling restart") and trial.tally.errors:
            found.append(f"{trial.name}: {dict(trial.tally.errors)}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with network() as (balancer, hosts):
        folder = hosts[0].environ["DRILL_FOLDER"]
        found: list[str] = []
        with Load(balancer, folder, small=8, large=2, rpc=4) as load:
            for number in range(1, arguments.rounds + 1):
                print(f"round {number}", flush=True)
                drill = Drill(balancer, hosts, load, folder, settle_s=3.0)
                drill.run("steady", drill.steady)
                drill.run("slow", drill.slowness)
                drill.run("hanging", drill.hang)
                drill.run("unplugged", drill.unplugged)
                drill.run("rolling restart", drill.rolling)
                drill.run("restart, HAProxy not told", drill.plain_restart)
                drill.run("kill -9", drill.death)
                drill.run("started again", drill.birth)
                found += problems(drill)
        for host in hosts:
            host.stop()
    for problem in found:
        print(f"PROBLEM {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
