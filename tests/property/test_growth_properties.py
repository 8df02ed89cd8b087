"""Counter growth between looks, while processes come, count, hide and die in any order."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shmserve.coordinator.stats.counter_deltas import CounterDeltas
from shmserve.coordinator.stats.counter_totals import CounterReading
from shmserve.core.stats import aggregation
from shmserve.core.stats.counter_pages import Gauges
from shmserve.core.stats.executor_counters import ExecutorCounts
from shmserve.core.stats.request_counters import RequestCounts
from shmserve.protocol.control.stats_messages import PageOwner

MODELS = [("a", "1"), ("a", "2"), ("b", "1")]


class Process:
    def __init__(self, number: int, role: str, old: bool) -> None:
        model = MODELS[number % 3] if role == "executor" else ("", "")
        self.owner = PageOwner(f"{role}-{number}", role, number, *model)
        self.old = old
        self.seen = False
        self.counts: dict[tuple[str, str], int] = {}

    def reading(self) -> CounterReading:
        if self.owner.role == "executor":
            done = sum(self.counts.values())
            return CounterReading(self.owner, Gauges(), runs=ExecutorCounts(executions=done))
        rows = {model: RequestCounts(succeeded=count) for model, count in self.counts.items()}
        return CounterReading(self.owner, Gauges(), rows)


class Growing(RuleBasedStateMachine):
    """`expected`: counts since each process began, or since the first look if it is older."""

    def __init__(self) -> None:
        super().__init__()
        self.growth = CounterDeltas()
        self.processes: list[Process] = []
        self.number = 0
        self.expected = {model: [0, 0] for model in MODELS}  # requests, executions
        self.found = {model: [0, 0] for model in MODELS}

    @rule(role=st.sampled_from(["http", "grpc", "executor"]), old=st.booleans())
    def comes(self, role: str, old: bool) -> None:
        self.number += 1
        process = Process(self.number, role, old)
        if old:  # the process counted before the first look
            process.counts = dict.fromkeys(MODELS if role != "executor" else MODELS[:1], 1000)
        self.processes.append(process)

    @rule(which=st.integers(0), model=st.sampled_from(MODELS), count=st.integers(1, 50))
    def counts(self, which: int, model: tuple[str, str], count: int) -> None:
        if not self.processes:
            return
        process = self.processes[which % len(self.processes)]
        executor = process.owner.role == "executor"
        if executor:
            model = (process.owner.model, process.owner.version)
        process.counts[model] = process.counts.get(model, 0) + count
        if process.seen or not process.old:
            self.expected[model][executor] += count

    @rule()
    def look(self) -> None:
        new = {p.owner.pid for p in self.processes if not p.old}
        self._take(self.growth.since([p.reading() for p in self.processes], new.__contains__))
        for process in self.processes:
            process.seen = True

    @rule(which=st.integers(0))
    def dies(self, which: int) -> None:
        """End a process with its final counts. Counts of a process never looked at are lost."""
        if not self.processes:
            return
        process = self.processes.pop(which % len(self.processes))
        if not process.seen and not process.old:
            for model, count in process.counts.items():
                self.expected[model][process.owner.role == "executor"] -= count
        self.growth.ended(process.reading())

    def _take(self, grown: dict[tuple[str, str], list[int]]) -> None:
        for model, row in grown.items():
            assert any(row)
            assert min(row) >= 0
            names = dict(
                zip(aggregation.MODEL_COLUMNS, aggregation.of_model(row, 1.0, 0), strict=True)
            )
            self.found[model][0] += int(names["requests"])
            self.found[model][1] += int(names["executions"])

    @invariant()
    def nothing_is_lost_nor_told_twice(self) -> None:
        if all(process.seen for process in self.processes):
            new = {p.owner.pid for p in self.processes if not p.old}
            self._take(self.growth.since([p.reading() for p in self.processes], new.__contains__))
            assert self.found == self.expected


Growing.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
TestGrowing = Growing.TestCase
