"""Loads, reloads and unloads under any order of events: no model is lost, no process stays.

The machine plays supervisor and executors, which are honest but may die at any time. A new
coordinator may take over, with nothing but the checkpoint.
"""

from math import inf

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shmserve import ids
from shmserve.coordinator.state import checkpoint as plans
from shmserve.core.control.reconciler import GRACE_S, Reconciler
from shmserve.core.control.records import InstanceRecord, Revision, VersionRecord
from shmserve.core.control.rollout import LINGER_S, Rollouts
from shmserve.core.memory.budget import Ledger
from shmserve.protocol.control.link_messages import Instance
from shmserve.tensor.spec import ModelSpec

MODELS = st.sampled_from(["a", "b"])  # "a" is a step of an ensemble
RUN_S = 5.0  # longest run of the ensemble
CHOICE = st.integers(0, 30)


class Process:
    def __init__(self, pid: int, instance: str) -> None:
        self.pid = pid
        self.instance = instance
        self.name = f"executor-{pid}-aa"
        self.linked = self.loaded = False


class ModelControlMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.reconciler = self.new_reconciler()
        self.orders: dict[str, Instance] = {}
        self.now = 1.0
        self.processes: dict[int, Process] = {}
        self.next_pid = 1
        self.supervised = True
        self.unloaded: set[str] = set()
        self.runs: list[float] = []  # starts of the ensemble's runs under way
        self.needed: dict[str, float] = {}  # instance -> end of the last run

    def new_reconciler(self):
        models = Rollouts(10.0, RUN_S, ["a"])
        return Reconciler(Ledger(1000, 100), 2.0, 10.0, 3, models=models)

    def record(self, name):
        return self.reconciler.models.by_name.get(name)

    def live(self, name):
        entries = self.reconciler.snapshot("e").models.get(name, {})
        return {i.name for entry in entries.values() for i in entry.instances}

    def pick(self, choice, wanted):
        found = [p for p in self.processes.values() if wanted(p)]
        return found[choice % len(found)] if found else None

    # ------------------------------------------------------------------ requests

    @rule(name=MODELS, versions=st.integers(1, 2), count=st.integers(1, 2))
    def load(self, name, versions, count):
        model = self.record(name)
        if model is not None and model.changing:
            return
        before = self.live(name)
        number = self.reconciler.models.number()
        records = []
        for version in range(1, versions + 1):
            spec = ModelSpec(name, str(version), "", "python", 0, (), ())
            own = []
            for index in range(count):
                instance = ids.reborn(ids.instance_name(name, spec.version, index), number)
                self.orders[instance] = Instance(instance, spec, "/x")
                own.append(InstanceRecord(instance))
            records.append(VersionRecord(spec, own))
        self.reconciler.models.load(name, Revision(number, records), self.now)
        self.unloaded.discard(name)
        if name == "a":  # runs under way use the new revision
            self.needed.clear()
        assert self.live(name) == before, "what serves goes on until the new one can"

    @rule(name=MODELS)
    def unload(self, name):
        model = self.record(name)
        if model is None or model.changing:
            return
        if name == "a" and self.runs:
            self.needed |= dict.fromkeys(self.live(name), self.now + LINGER_S + RUN_S)
        self.reconciler.models.unload(name, self.now)
        self.unloaded.add(name)
        assert self.live(name) == set()

    @rule()
    def begin_run(self):
        if "a" not in self.unloaded:
            self.runs.append(self.now)

    @rule()
    def end_runs(self):
        self.runs.clear()
        self.needed.clear()

    # ----------------------------------------------------------- honest processes

    @rule(choice=CHOICE)
    def start(self, choice):
        running = {p.instance for p in self.processes.values()}
        due = [name for name in self.reconciler.desired() if name not in running]
        if not due:
            return
        process = Process(self.next_pid, due[choice % len(due)])
        self.next_pid += 1
        self.processes[process.pid] = process
        self.reconciler.started(process.instance, process.pid, self.now)

    @rule(choice=CHOICE)
    def link(self, choice):
        process = self.pick(choice, lambda p: not p.linked)
        if process is not None:
            process.linked = True
            self.hello(process)

    def hello(self, process):
        self.reconciler.hello(process.name, "executor", process.pid, 0, process.instance, self.now)
        if process.loaded:
            self.tell_loaded(process)

    @rule(choice=CHOICE)
    def finish_loading(self, choice):
        process = self.pick(choice, lambda p: p.linked and not p.loaded)
        if process is not None:
            process.loaded = True
            name = process.instance.split("/")[0]
            before = self.live(name)
            self.tell_loaded(process)
            assert self.live(name) or not before, "a change of revisions leaves no gap"

    def tell_loaded(self, process):
        name, version, _ = process.instance.split("/")
        spec = ModelSpec(name, version, "", "python", 0, (), ())
        self.reconciler.loaded(process.name, spec, f"{process.name}.sock", self.now)

    @rule()
    def all_load(self):
        for _ in range(8):
            self.start(0)
            self.link(0)
            self.finish_loading(0)

    @rule(name=MODELS)
    def a_reload_fails(self, name):
        self.all_load()
        self.load(name, 2, 1)
        self.start(0)
        self.link(0)
        before = self.live(name)
        self.fail_to_load(0)
        assert self.live(name) == before

    @rule(choice=CHOICE)
    def fail_to_load(self, choice):
        process = self.pick(choice, lambda p: p.linked and not p.loaded)
        if process is not None:
            self.reconciler.load_failed(process.name, "the model says no", self.now)
            self.end(process)

    @rule(choice=CHOICE, exit_first=st.booleans())
    def die(self, choice, exit_first):
        process = self.pick(choice, lambda p: True)
        if process is not None:
            self.end(process, exit_first)

    def end(self, process, exit_first=False):
        del self.processes[process.pid]
        steps = [
            lambda: self.reconciler.gone(process.name, self.now),
            lambda: (
                process.instance in self.reconciler.instances
                and self.reconciler.exited(
                    process.instance, process.pid, "signal SIGKILL", self.now
                )
            ),
        ]
        for step in reversed(steps) if exit_first else steps:
            step()

    @rule()
    def stop_what_is_not_desired(self):
        desired = set(self.reconciler.desired())
        for process in list(self.processes.values()):
            if process.instance not in desired:
                self.end(process)

    @rule(seconds=st.floats(0.1, 4))
    def wait(self, seconds):
        self.now += seconds
        self.tick()

    def tick(self):
        self.reconciler.models.note_oldest_run(min(self.runs, default=inf))
        self.reconciler.tick(self.now)

    @rule()
    def another_supervisor(self):
        """Replace the supervisor: unlinked children are gone, the linked children are adopted."""
        for process in [p for p in self.processes.values() if not p.linked]:
            del self.processes[process.pid]
        self.reconciler.hello("supervisor-1-aa", "supervisor", 9, 0, "", self.now)

    @rule(reconnect=st.booleans())
    def another_coordinator(self, reconnect):
        plan = plans.describe("e", self.reconciler, self.orders, {})
        published = self.reconciler.snapshot("e")
        self.reconciler = self.new_reconciler()
        self.needed.clear()  # executors of leaving revisions are dismissed
        self.reconciler.models.restore(plan.models, plan.next_number, self.now)
        self.orders = plan.instances
        self.reconciler.restore(published, self.now)
        for name in ("a", "b"):
            assert self.live(name) == {
                i.name for e in published.models.get(name, {}).values() for i in e.instances
            }
        for process in self.processes.values():  # the supervisor reports, executors come back
            if process.instance in self.reconciler.instances:
                self.reconciler.started(process.instance, process.pid, self.now)
            if process.linked:
                self.hello(process)

    # ------------------------------------------------------------------ invariants

    @invariant()
    def only_what_serves_or_comes_is_desired(self):
        for name in self.reconciler.desired():
            model, _ = self.reconciler.models.home(name)
            staying = [i for i in (model.serving, model.coming) if i is not None]
            record = self.reconciler.instances[name]
            limit_s = 4 + LINGER_S + (RUN_S if model.name == "a" else 0)
            lingering = 0 < self.now < record.leave_at + limit_s and record.leave_at
            assert lingering or any(record in i.instances() for i in staying)
            assert model.name not in self.unloaded or lingering

    @invariant()
    def an_unloaded_step_stays_for_the_runs_that_began_before(self):
        for name, until in self.needed.items():
            assert self.now >= until or not self.reconciler.instances[name].left

    @invariant()
    def every_instance_belongs_to_a_revision(self):
        models = self.reconciler.models.by_name.values()
        known = [r.name for m in models for i in m.revisions() for r in i.instances()]
        assert sorted(known) == sorted(self.reconciler.instances)

    @invariant()
    def one_revision_is_published(self):
        for name in ("a", "b"):
            model = self.record(name)
            live = self.live(name)
            if live:
                assert model is not None
                assert model.serving is not None
                assert live <= {i.name for i in model.serving.instances()}

    @invariant()
    def who_is_in_a_hurry_is_not_desired(self):
        assert not set(self.reconciler.hurried()) & set(self.reconciler.desired())

    @precondition(lambda self: self.reconciler.instances)
    @rule()
    def in_the_end_everything_settles(self):
        """With a working supervisor and models that load, all changes end."""
        for _ in range(20):
            self.now += max(LINGER_S, GRACE_S)
            self.tick()
            self.stop_what_is_not_desired()
            for _ in range(8):
                self.start(0)
                self.link(0)
                self.finish_loading(0)
        for model in self.reconciler.models.by_name.values():
            assert not model.changing
            assert not model.leaving
        assert {p.instance for p in self.processes.values()} == set(self.reconciler.desired())
        assert set(self.reconciler.instances) == {
            record.name
            for model in self.reconciler.models.by_name.values()
            if model.serving is not None
            for record in model.serving.instances()
        }


TestModelControl = ModelControlMachine.TestCase
TestModelControl.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
