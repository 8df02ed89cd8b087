"""The reconciler under any order of events: invariants hold, and no process is started twice."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shmserve.core.control.lifecycle import State
from shmserve.core.control.reconciler import Reconciler
from shmserve.core.control.records import InstanceRecord, Revision, VersionRecord
from shmserve.core.memory.budget import Ledger
from shmserve.errors import ProtocolViolation
from shmserve.tensor.spec import ModelSpec

SPEC = ModelSpec("m", "1", "", "python", 0, (), ())
NAMES = ["m/1/0", "m/1/1"]
PIDS = st.integers(1, 4)
INSTANCES = st.sampled_from(NAMES)


def reconciler_at(now):
    reconciler = Reconciler(Ledger(1000, 100), 2.0, 10.0)
    records = [InstanceRecord(name) for name in NAMES]
    reconciler.models.load("m", Revision(1, [VersionRecord(SPEC, records)]), now, required=True)
    return reconciler


class FleetMachine(RuleBasedStateMachine):
    """Process i has pid i and the link executor-i-aa, and runs the instance named at hello."""

    def __init__(self):
        super().__init__()
        self.reconciler = reconciler_at(0.0)
        self.now = 0.0
        self.linked: set[int] = set()
        self.failed: set[str] = set()

    def attempt(self, act, *args):
        try:
            act(*args, self.now)
        except ProtocolViolation:
            return False
        return True

    @rule(pid=PIDS, name=INSTANCES)
    def started(self, pid, name):
        self.attempt(self.reconciler.started, name, pid)

    @rule(pid=PIDS, name=INSTANCES)
    def exited(self, pid, name):
        self.attempt(self.reconciler.exited, name, pid, "signal SIGKILL")

    @rule(pid=PIDS, name=INSTANCES)
    def hello(self, pid, name):
        try:
            self.reconciler.hello(f"executor-{pid}-aa", "executor", pid, 0, name, self.now)
        except ProtocolViolation:  # the link is closed
            self.gone(pid)
        else:
            self.linked.add(pid)

    @rule(pid=PIDS)
    def gone(self, pid):
        self.reconciler.gone(f"executor-{pid}-aa", self.now)
        self.linked.discard(pid)

    @rule(pid=PIDS)
    def loaded(self, pid):
        self.attempt(self.reconciler.loaded, f"executor-{pid}-aa", SPEC, f"executor-{pid}-aa.sock")

    @rule(pid=PIDS)
    def load_failed(self, pid):
        self.attempt(self.reconciler.load_failed, f"executor-{pid}-aa", "no")
        self.failed |= {n for n, r in self.reconciler.instances.items() if r.state is State.FAILED}

    @rule(pid=PIDS, busy_ms=st.integers(0, 5000))
    def busy(self, pid, busy_ms):
        self.attempt(self.reconciler.busy, f"executor-{pid}-aa", busy_ms)

    @rule(pid=PIDS)
    def outgrown(self, pid):
        self.attempt(self.reconciler.outgrown, f"executor-{pid}-aa", "too much memory")
        self.failed |= {n for n, r in self.reconciler.instances.items() if r.state is State.FAILED}

    @rule(seconds=st.floats(0, 8))
    def wait(self, seconds):
        self.now += seconds
        self.reconciler.tick(self.now)

    @rule()
    def another_supervisor(self):
        self.reconciler.hello("supervisor-1-aa", "supervisor", 9, 0, "", self.now)

    @rule()
    def coordinator_restart(self):
        before = self.reconciler.snapshot("e")
        self.reconciler = reconciler_at(self.now)
        self.reconciler.restore(before, self.now)
        self.linked.clear()
        self.failed = {n for n, r in self.reconciler.instances.items() if r.state is State.FAILED}

    @invariant()
    def published_instances_have_a_link_or_are_awaited(self):
        for live in self.reconciler.snapshot("e").models["m"]["1"].instances:
            record = self.reconciler.instances[live.name]
            assert record.state is State.READY
            assert live.pid in self.linked or record.awaited_until > 0
            assert live.endpoint == f"executor-{live.pid}-aa.sock"

    @invariant()
    def a_process_runs_one_instance(self):
        processes = [r.process for r in self.reconciler.instances.values() if r.process]
        assert len(processes) == len(set(processes))

    @invariant()
    def failed_and_stopping_instances_are_not_desired(self):
        desired = set(self.reconciler.desired())
        assert not desired & self.failed
        for record in self.reconciler.instances.values():
            assert (record.name in desired) == (record.state not in (State.FAILED, State.STOPPING))


TestFleet = FleetMachine.TestCase
TestFleet.settings = settings(max_examples=300, stateful_step_count=50, deadline=None)
