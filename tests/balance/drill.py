"""Balancer drill: HAProxy before three services, under load, while hosts fail and restart.

    python -m tests.balance.drill

Prints for each trial: requests sent, answered, sent to another host by HAProxy, ended with a clear
error, and lost (neither); requests that a model ran twice; HAProxy's time to notice; the longest
time without any answer.
"""

import argparse
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from tests.balance.hosts import BACKENDS, NAMES, Balancer, Host, network, slow
from tests.balance.load import PER_CALL, Load, Tally
from tests.needs import ip
from tests.running_server import wait_until

_REFUSALS = {"503", "UNAVAILABLE", "RESOURCE_EXHAUSTED"}


@dataclass
class Trial:
    """Result of a trial; `times`: durations in seconds, by event."""

    name: str
    tally: Tally
    times: dict[str, float]

    def __str__(self) -> str:
        times = ", ".join(f"{what} {seconds:.2f} s" for what, seconds in self.times.items())
        return f"{self.name}: {self.tally.line()}; {times or 'nothing to notice'}"


@dataclass
class Drill:
    """All trials in turn; `settle_s`: seconds of load before and after the disturbance."""

    balancer: Balancer
    hosts: list[Host]
    load: Load
    folder: str
    settle_s: float
    trials: dict[str, Trial] = field(default_factory=dict)

    def run(self, name: str, trial: Callable[[dict[str, float]], None]) -> Trial:
        """Run one trial, which notes its times."""
        times: dict[str, float] = {}
        again, began = self.load.redispatched(), time.monotonic()
        time.sleep(self.settle_s / 2)
        trial(times)
        time.sleep(self.settle_s)
        tally = self.load.tally(began, time.monotonic(), self.load.redispatched() - again)
        self.trials[name] = made = Trial(name, tally, times)
        reasons = [f"{count} x {why}" for why, count in made.tally.reasons.most_common(5)]
        print(made, *made.tally.lost[:5], *reasons, sep="\n  ", flush=True)
        return made

    # ------------------------------------------------------------- trials

    def steady(self, times: dict[str, float]) -> None:
        """Nothing befalls anybody."""

    def slowness(self, times: dict[str, float]) -> None:
        """A host takes fifteen times as long for each request."""
        host = self.hosts[0].name
        with slow(self.folder, host) as began:
            self.wait(lambda: self.part(host) < 1 / 6, "gets half of its part", began, times)
            time.sleep(self.settle_s)
        self.wait(lambda: self.part(host) > 1 / 4, "as before", time.monotonic(), times)

    def overload(self, times: dict[str, float]) -> None:
        """Send more requests than all hosts have room for; the hosts refuse the excess."""
        lowest = 100
        with self.load.more(60):
            until = time.monotonic() + self.settle_s + 2.5  # the agents are asked every second
            while time.monotonic() < until:
                time.sleep(0.1)
                lowest = min(lowest, *(self.weight(name) for name in NAMES))
        times["(lowest weight, of 1)"] = lowest / 100

    def hang(self, times: dict[str, float]) -> None:
        """Every process of a host is stopped, and goes on later."""
        host, began = self.hosts[2], time.monotonic()
        host.signal_all(signal.SIGSTOP)
        try:
            self.wait(lambda: self.down(host), "noticed", began, times)
            time.sleep(self.settle_s)
        finally:
            host.signal_all(signal.SIGCONT)
        self.wait(lambda: self.balancer.serves(host.name), "back", time.monotonic(), times)

    def unplugged(self, times: dict[str, float]) -> None:
        """The cable of a host is pulled, and plugged in again."""
        host, began = self.hosts[2], time.monotonic()
        assert ip("-n", self.balancer.namespace, "link", "set", host.name, "down")
        self.wait(lambda: self.down(host), "noticed", began, times)
        time.sleep(self.settle_s)
        assert ip("-n", self.balancer.namespace, "link", "set", host.name, "up")
        self.wait(lambda: self.balancer.serves(host.name), "back", time.monotonic(), times)

    def rolling(self, times: dict[str, float], hosts: int = len(NAMES)) -> None:
        """Restart the hosts in turn: drain a host in HAProxy, restart it, and let it return."""
        start = time.monotonic()
        for host in self.hosts[:hosts]:
            began = time.monotonic()
            self.balancer.set(host.name, "drain")
            self.note(start, f"{host.name}: set to drain")
            self.balancer.wait_idle(host.name)
            self.note(start, f"{host.name}: nothing is unanswered; SIGTERM")
            host.stop()
            self.note(start, f"{host.name}: ended; started anew")
            host.start()
            self.note(start, f"{host.name}: ready")
            self.wait(lambda: self.checked(host.name), f"{host.name} back", began, times)  # noqa: B023
            self.balancer.set(host.name, "ready")
            wait_until(lambda: self.balancer.serves(host.name), f"{host.name} serves")  # noqa: B023
            self.note(start, f"{host.name}: HAProxy has found it ready, and sends it requests")

    def note(self, start: float, text: str) -> None:
        """Print an event, with the results of requests since `start`."""
        now = time.monotonic()
        outcomes = self.load.outcomes(start, now)
        answered = sum(outcome.answered for outcome in outcomes)
        failed = len(outcomes) - answered
        print(f"  {now - start:5.2f} s  {text}; answered {answered}, failed {failed}", flush=True)

    def plain_restart(self, times: dict[str, float]) -> None:
        """Restart a host without telling HAProxy."""
        host, began = self.hosts[0], time.monotonic()
        host.stop()
        host.start()
        self.wait(lambda: self.balancer.serves(host.name), "back", began, times)

    def death(self, times: dict[str, float]) -> None:
        """Every process of a host is killed at once."""
        host, began = self.hosts[1], time.monotonic()
        host.kill()
        self.wait(lambda: self.down(host), "noticed", began, times)

    def birth(self, times: dict[str, float]) -> None:
        """Start a dead host again."""
        host, began = self.hosts[1], time.monotonic()
        host.start()
        times["ready"] = time.monotonic() - began
        self.wait(lambda: self.balancer.serves(host.name), "noticed", began, times)

    # -------------------------------------------------------------- watching

    def wait(
        self, seen: Callable[[], bool], what: str, began: float, times: dict[str, float]
    ) -> None:
        wait_until(seen, what)
        times[what] = time.monotonic() - began

    def down(self, host: Host) -> bool:
        return self.balancer.states(host.name) == {"DOWN"}

    def weight(self, name: str) -> int:
        """As the host's agent has told HAProxy last, of 100."""
        return int(self.balancer.table()[BACKENDS[0], name]["weight"])

    def part(self, name: str) -> float:
        """Return a host's share of all requests over HTTP, measured in a quarter of a second."""
        before = self.balancer.table()
        time.sleep(0.25)
        table = self.balancer.table()
        sent = {
            host: int(table[BACKENDS[0], host]["stot"]) - int(before[BACKENDS[0], host]["stot"])
            for host in NAMES
        }
        return sent[name] / max(1, sum(sent.values()))

    def checked(self, name: str) -> bool:
        """Return True if all health checks of a draining host succeed."""
        table = self.balancer.table()
        rows = [table[backend, name] for backend in BACKENDS]
        return all(r["check_status"] == "L7OK" and r["status"].startswith("DRAIN") for r in rows)


def problems(drill: Drill) -> list[str]:
    """Return violations: no answer, a second run, and avoidable errors."""
    found = []
    for trial in drill.trials.values():
        # If HAProxy finds a host down while connecting, it closes the client's connection without
        # an answer.
        known = ", not begun: lost: RemoteDisconnected" if trial.name == "unplugged" else "nothing"
        found += [f"{trial.name}: {lost}" for lost in trial.tally.lost if known not in lost]
        twice = (which for which in trial.tally.twice if not which.startswith(PER_CALL))
        found += [f"{trial.name}: request {which} ran twice" for which in twice]
        found += [f"{trial.name}: request {n} ran, and 503 said no" for n in trial.tally.untrue]
        if trial.name in ("steady", "slow", "rolling restart") and trial.tally.errors:
            found.append(f"{trial.name}: {dict(trial.tally.errors)}")
        if trial.name == "overload":
            told = {error.rpartition(" ")[2] for error in trial.tally.errors}
            found += [f"{trial.name}: {error}" for error in told - _REFUSALS]
            found += [f"{trial.name}: nothing was sent again"] * (not trial.tally.again)
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    with network() as (balancer, hosts):
        folder = hosts[0].environ["DRILL_FOLDER"]
        found: list[str] = []
        with Load(balancer, folder, small=8, large=2, rpc=3) as load:
            for number in range(1, arguments.rounds + 1):
                print(f"round {number}", flush=True)
                drill = Drill(balancer, hosts, load, folder, settle_s=3.0)
                drill.run("steady", drill.steady)
                drill.run("slow", drill.slowness)
                drill.run("overload", drill.overload)
                drill.run("hanging", drill.hang)
                drill.run("unplugged", drill.unplugged)
                drill.run("rolling restart", drill.rolling)
                drill.run("restart, HAProxy not told", drill.plain_restart)
                drill.run("kill -9", drill.death)
                drill.run("started again", drill.birth)
                found += problems(drill)
        for host in hosts:
            host.stop()
        if found:
            print(balancer.log())
    for problem in found:
        print(f"PROBLEM {problem}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
