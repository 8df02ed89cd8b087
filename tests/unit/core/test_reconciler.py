"""The coordinator's decisions, event by event."""

from math import inf

import msgspec
import pytest

from shmserve.core.control.lifecycle import State
from shmserve.core.control.reconciler import GRACE_S, Reconciler
from shmserve.core.control.records import InstanceRecord, Revision, VersionRecord
from shmserve.core.control.rollout import LINGER_S, Rollouts
from shmserve.core.effects import AnswerGrant, Desire, Dismiss, DropEndpoint, Publish, given_up
from shmserve.core.memory.budget import Ledger
from shmserve.core.registry import ModelState, Snapshot
from shmserve.errors import ProtocolViolation
from shmserve.tensor.spec import EnsembleStep, ModelSpec

SPEC = ModelSpec("m", "1", "", "python", 0, (), ())
NAMES = ["m/1/0", "m/1/1"]


def make(names=NAMES):
    reconciler = Reconciler(Ledger(1000, 100), execute_timeout_s=2.0, load_timeout_s=10.0)
    reconciler.models.load("m", revision(names), 0.0, required=True)
    reconciler.scanned({})
    return reconciler


def revision(names=NAMES, number=1):
    return Revision(number, [VersionRecord(SPEC, [InstanceRecord(name) for name in names])])


def bring_up(reconciler, name="m/1/0", pid=10, process="executor-1-aa"):
    reconciler.started(name, pid, 1.0)
    reconciler.hello(process, "executor", pid, 0, name, 1.5)
    return reconciler.loaded(process, SPEC, f"{process}.sock", 2.0)


def started():
    """Return a reconciler to which the only executor has said hello; the executor loads."""
    reconciler = make(["m/1/0"])
    reconciler.started("m/1/0", 10, 1.0)
    reconciler.hello("executor-1-aa", "executor", 10, 0, "m/1/0", 1.5)
    return reconciler


def up(names=NAMES):
    """Return a reconciler with an executor that has loaded."""
    reconciler = make(names)
    bring_up(reconciler)
    return reconciler


def entry(reconciler):
    return reconciler.snapshot("e").models["m"]["1"]


def test_a_version_is_ready_with_its_first_instance_and_takes_its_spec():
    reconciler = make()
    assert entry(reconciler).state is ModelState.LOADING
    reconciler.started("m/1/0", 10, 1.0)
    reconciler.hello("executor-1-aa", "executor", 10, 0, "m/1/0", 1.5)
    complete = ModelSpec("m", "1", "onnxruntime_onnx", "onnxruntime", 8, (), ())
    assert Publish() in reconciler.loaded("executor-1-aa", complete, "executor-1-aa.sock", 2.0)
    assert entry(reconciler).state is ModelState.READY
    assert entry(reconciler).spec == complete
    assert [i.name for i in entry(reconciler).instances] == ["m/1/0"]


def test_an_executor_that_disconnects_is_unpublished_at_once():
    reconciler = up()
    assert Publish() in reconciler.gone("executor-1-aa", 3.0)
    assert entry(reconciler).state is ModelState.READY
    assert entry(reconciler).instances == ()
    reconciler.exited("m/1/0", 10, "signal SIGKILL", 3.1)
    assert entry(reconciler).reason == "its executor ended: signal SIGKILL"
    bring_up(reconciler, pid=11, process="executor-2-bb")
    assert [i.pid for i in entry(reconciler).instances] == [11]


def test_a_failed_load_is_definitive():
    reconciler = started()
    assert Desire() in reconciler.load_failed("executor-1-aa", "no such file", 2.0)
    reconciler.gone("executor-1-aa", 2.1)
    reconciler.exited("m/1/0", 10, "status 1", 2.2)
    assert reconciler.desired() == []
    assert entry(reconciler).state is ModelState.UNAVAILABLE
    assert entry(reconciler).reason == "no such file"


def test_one_failed_instance_of_two_leaves_the_version_ready():
    reconciler = up()
    reconciler.hello("executor-2-bb", "executor", 11, 0, "m/1/1", 2.0)
    reconciler.load_failed("executor-2-bb", "out of memory", 3.0)
    assert entry(reconciler).state is ModelState.READY
    assert reconciler.desired() == ["m/1/0"]


def test_the_watchdog_takes_an_instance_out_until_it_has_ended():
    reconciler = up(["m/1/0"])
    assert reconciler.busy("executor-1-aa", 2000, 5.0) == []
    assert Desire() in reconciler.busy("executor-1-aa", 2001, 5.0)
    assert reconciler.desired() == []
    assert entry(reconciler).instances == ()
    assert reconciler.busy("executor-1-aa", 9000, 6.0) == []
    reconciler.gone("executor-1-aa", 7.0)
    assert Desire() in reconciler.exited("m/1/0", 10, "signal SIGKILL", 7.1)
    assert reconciler.desired() == ["m/1/0"]


def test_an_instance_with_too_much_memory_is_replaced_unless_it_loads_for_the_first_time():
    reconciler = up()
    reconciler.started("m/1/1", 11, 1.0)
    reconciler.hello("executor-2-bb", "executor", 11, 0, "m/1/1", 1.5)
    effects = reconciler.outgrown("executor-2-bb", "too much", 3.0)
    assert given_up("m/1/1", "too much") in effects
    assert Desire() in effects
    assert reconciler.loaded("executor-2-bb", SPEC, "executor-2-bb.sock", 3.1) == []
    assert (reconciler.desired(), reconciler.hurried()) == (["m/1/0"], ["m/1/1"])
    assert reconciler.outgrown("executor-2-bb", "too much", 3.2) == []
    assert Publish() in reconciler.outgrown("executor-1-aa", "too much", 4.0)
    assert (reconciler.desired(), reconciler.hurried()) == ([], NAMES)
    assert (entry(reconciler).instances, entry(reconciler).reason) == ((), "too much")
    reconciler.exited("m/1/0", 10, "signal SIGKILL", 5.0)
    reconciler.started("m/1/0", 12, 6.0)
    reconciler.hello("executor-3-cc", "executor", 12, 0, "m/1/0", 6.5)
    assert Desire() in reconciler.outgrown("executor-3-cc", "too much", 7.0)
    assert reconciler.instances["m/1/0"].state is State.STOPPING, "not for good"


def test_an_instance_that_never_loads_is_given_up():
    reconciler = started()
    assert reconciler.tick(10.0) == []
    effects = reconciler.tick(10.1)
    assert Desire() in effects
    assert [e.process for e in effects if isinstance(e, Dismiss)] == ["executor-1-aa"]
    assert (reconciler.desired(), reconciler.hurried()) == ([], ["m/1/0"])
    assert entry(reconciler).state is ModelState.UNAVAILABLE
    assert "10 s" in entry(reconciler).reason
    assert reconciler.loaded("executor-1-aa", SPEC, "executor-1-aa.sock", 10.2) == []


def test_an_instance_that_had_loaded_is_never_given_up():
    reconciler = up(["m/1/0"])
    for turn in range(5):
        reconciler.gone("executor-1-aa", 3.0 + turn)
        reconciler.exited("m/1/0", 10, "signal SIGKILL", 3.1 + turn)
        reconciler.started("m/1/0", 10, 3.2 + turn)
    assert reconciler.desired() == ["m/1/0"]
    # the instance is stopped, and desired again after the end
    assert Desire() in reconciler.tick(100.0)
    assert reconciler.hurried() == ["m/1/0"]
    reconciler.exited("m/1/0", 10, "signal SIGKILL", 101.0)
    assert reconciler.desired() == ["m/1/0"]


def test_processes_that_end_while_they_load_are_started_a_bounded_number_of_times():
    reconciler = make(["m/1/0"])
    for turn in range(3):
        assert reconciler.desired() == ["m/1/0"]
        reconciler.started("m/1/0", 10 + turn, 1.0)
        reconciler.hello(f"executor-{turn}-aa", "executor", 10 + turn, 0, "m/1/0", 1.5)
        reconciler.gone(f"executor-{turn}-aa", 1.6)
        reconciler.exited("m/1/0", 10 + turn, "signal SIGSEGV", 1.7)
    assert reconciler.desired() == []
    assert entry(reconciler).state is ModelState.UNAVAILABLE
    assert "3 times" in entry(reconciler).reason
    assert "SIGSEGV" in entry(reconciler).reason


def test_an_old_process_end_does_not_touch_the_new():
    reconciler = up(["m/1/0"])
    assert reconciler.exited("m/1/0", 9, "signal SIGKILL", 3.0) == []
    assert len(entry(reconciler).instances) == 1


def test_of_two_executors_the_supervisors_latest_stays():
    reconciler = up(["m/1/0"])
    effects = reconciler.started("m/1/0", 20, 3.0)
    assert [e.process for e in effects if isinstance(e, Dismiss)] == ["executor-1-aa"]
    assert reconciler.loaded("executor-1-aa", SPEC, "executor-1-aa.sock", 3.1) == []
    reconciler.gone("executor-1-aa", 3.2)
    reconciler.hello("executor-2-bb", "executor", 20, 0, "m/1/0", 3.3)
    reconciler.loaded("executor-2-bb", SPEC, "executor-2-bb.sock", 3.4)
    assert [i.pid for i in entry(reconciler).instances] == [20]


def test_a_rival_nobody_started_is_dismissed():
    reconciler = up(["m/1/0"])
    effects = reconciler.hello("executor-9-zz", "executor", 99, 0, "m/1/0", 3.0)
    assert [e.process for e in effects if isinstance(e, Dismiss)] == ["executor-9-zz"]
    assert [i.pid for i in entry(reconciler).instances] == [10]


def test_what_a_dead_executor_had_still_sent_is_not_credited_to_its_successor():
    reconciler = make(["m/1/0"])
    reconciler.hello("executor-1-aa", "executor", 10, 0, "m/1/0", 1.0)
    reconciler.exited("m/1/0", 10, "signal SIGKILL", 1.1)
    reconciler.hello("executor-2-bb", "executor", 11, 0, "m/1/0", 1.2)
    assert reconciler.loaded("executor-1-aa", SPEC, "executor-1-aa.sock", 1.3) == []
    assert entry(reconciler).instances == ()


def test_a_failed_load_counts_even_if_the_end_of_its_process_overtakes_it():
    reconciler = started()
    reconciler.exited("m/1/0", 10, "status 1", 1.6)
    assert Desire() in reconciler.load_failed("executor-1-aa", "no such file", 1.7)
    assert reconciler.desired() == []
    assert entry(reconciler).reason == "no such file"


def test_an_executor_cannot_change_its_instance():
    reconciler = up()
    again = restarted(reconciler)
    with pytest.raises(ProtocolViolation, match="ran another instance"):
        again.hello("executor-1-aa", "executor", 10, 0, "m/1/1", 100.1)


def test_an_executor_of_nothing_known_is_dismissed_unless_its_pid_is_known():
    reconciler = make()
    effects = reconciler.hello("executor-9-zz", "executor", 99, 0, "other/1/0", 3.0)
    assert effects == [Dismiss("executor-9-zz", "not wanted")]
    reconciler.started("m/1/1", 31, 1.0)
    reconciler.hello("executor-1-aa", "executor", 31, 0, "", 1.5)
    assert reconciler.instances["m/1/1"].state is State.LOADING


def restarted(reconciler):
    again = make()
    again.restore(reconciler.snapshot("e"), 100.0)
    return again


def test_after_a_restart_what_was_published_stays_for_the_grace():
    reconciler = up()
    bring_up(reconciler, "m/1/1", 11, "executor-2-bb")
    again = restarted(reconciler)
    assert again.awaiting
    assert len(entry(again).instances) == 2
    again.hello("executor-1-aa", "executor", 10, 0, "m/1/0", 100.5)
    again.loaded("executor-1-aa", SPEC, "executor-1-aa.sock", 100.5)
    again.instances["m/1/1"].deadline = again.instances["m/1/0"].deadline = 200.0
    assert again.tick(100.0 + GRACE_S - 0.1) == []
    decided = again.tick(100.0 + GRACE_S)
    assert Publish() in decided
    assert DropEndpoint("executor-2-bb", 11) in decided  # no supervisor may know of this end
    assert not again.awaiting
    assert [i.name for i in entry(again).instances] == ["m/1/0"]
    assert again.desired() == NAMES


def test_a_new_supervisor_adopts_what_has_a_link_and_forgets_the_rest():
    reconciler = up()
    reconciler.started("m/1/1", 11, 1.0)  # by a supervisor that died before its executor said hello
    assert Desire() in reconciler.hello("supervisor-2-aa", "supervisor", 5, 0, "", 3.0)
    assert reconciler.running() == [("m/1/0", 10, "executor-1-aa")]
    assert reconciler.instances["m/1/1"].pid == 0


def test_a_stopped_instance_whose_supervisor_died_is_wanted_again():
    reconciler = up(["m/1/0"])
    reconciler.busy("executor-1-aa", 5000, 3.0)
    reconciler.gone("executor-1-aa", 4.0)
    assert reconciler.desired() == []
    reconciler.hello("supervisor-2-aa", "supervisor", 5, 0, "", 5.0)
    assert reconciler.desired() == ["m/1/0"]


def test_a_drain_is_published_and_told_to_executors_once():
    reconciler = up()
    effects = reconciler.drain()
    assert Publish() in effects
    assert Dismiss("executor-1-aa", "drain") in effects
    assert reconciler.snapshot("e").draining
    assert reconciler.drain() == []


def test_what_a_dead_process_held_is_free():
    reconciler = make()
    reconciler.hello("http-1-aa", "http", 1, 900, "", 0.0)
    reconciler.hello("http-2-bb", "http", 2, 0, "", 0.0)
    reconciler.ledger.grant("http-2-bb", 1, 500, 1.0)
    assert reconciler.gone("http-1-aa", 1.1) == [AnswerGrant("http-2-bb", 1, True)]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda reconciler: reconciler.loaded("http-1-aa", SPEC, "x.sock", 1.0),
        lambda reconciler: reconciler.loaded("executor-1-aa", SPEC, "../x.sock", 1.0),
        lambda reconciler: reconciler.started("nothing/1/0", 1, 1.0),
        lambda reconciler: reconciler.hello("http-3-cc", "http", 3, -1, "", 1.0),
    ],
)
def test_what_the_protocol_forbids_is_refused(wrong):
    reconciler = make()
    reconciler.hello("http-1-aa", "http", 1, 0, "", 0.0)
    reconciler.hello("executor-1-aa", "executor", 10, 0, "m/1/0", 0.0)
    with pytest.raises(ProtocolViolation):
        wrong(reconciler)


def test_without_any_frontend_of_a_kind_the_service_is_not_ready():
    reconciler = Reconciler(Ledger(1000, 100), 2.0, 10.0)
    reconciler.scanned({})

    def ready():
        snapshot = reconciler.snapshot("e1")
        return snapshot.why_not_ready or snapshot.ready

    assert ready() is True
    assert reconciler.serving("grpc", "") == []
    assert reconciler.serving("grpc", "status 1") == [Publish()]
    assert ready() == "no gRPC process serves", "clients do not hear why"
    assert reconciler.snapshot("e1").unserved == {"grpc": "status 1"}
    reconciler.serving("grpc", "")

    for name in ("http-1-aa", "http-2-bb"):
        reconciler.hello(name, "http", 1, 0, "", 0.0)
    reconciler.gone("http-1-aa", 1.0)
    reconciler.tick(100.0)
    assert ready() is True, "one is left"
    reconciler.gone("http-2-bb", 100.0)
    reconciler.tick(109.0)
    assert ready() is True, "gunicorn starts another"
    (log, publish) = reconciler.tick(110.0)
    assert "no HTTP worker serves" in log.text
    assert publish == Publish()
    assert reconciler.tick(120.0) == []
    reconciler.serving("grpc", "status 1")
    assert ready() == "no gRPC process serves and no HTTP worker serves"
    reconciler.serving("grpc", "")
    reconciler.hello("http-3-cc", "http", 3, 0, "", 121.0)
    assert ready() is True


def test_a_coordinator_that_starts_after_the_last_worker_ended_notices():
    reconciler = Reconciler(Ledger(1000, 100), 2.0, 10.0)
    reconciler.scanned({})
    assert reconciler.tick(500.0) == reconciler.tick(509.0) == []
    reconciler.tick(510.0)
    assert reconciler.snapshot("e1").why_not_ready == "no HTTP worker serves"
    reconciler.hello("http-1-aa", "http", 1, 0, "", 511.0)
    reconciler.tick(600.0)
    assert reconciler.snapshot("e1").ready


def test_a_new_coordinator_knows_what_is_not_served():
    before = Snapshot("e1", 3, complete=True, unserved={"grpc": "status 1"})
    reconciler = Reconciler(Ledger(1000, 100), 2.0, 10.0)
    reconciler.scanned({})
    reconciler.restore(before, 0.0)
    assert not reconciler.snapshot("e1").ready


def unloaded_step(steps=("m",)):
    """Return a reconciler, model unloaded at 3 s, and when the instance leaves at the earliest."""
    models = Rollouts(10.0, 60.0, steps)
    reconciler = Reconciler(Ledger(1000, 100), 2.0, 10.0, models=models)
    models.load("m", revision(["m/1/0"]), 0.0)
    bring_up(reconciler)
    models.unload("m", 3.0)
    assert models.awaits_runs == bool(steps)
    return reconciler, 3.0 + LINGER_S


def stays(reconciler, now, oldest_run):
    reconciler.models.note_oldest_run(oldest_run)
    reconciler.tick(now)
    return "m/1/0" in reconciler.desired()


def test_an_unloaded_step_stays_for_the_runs_of_its_ensembles():
    reconciler, at = unloaded_step()
    assert stays(reconciler, at + 59.9, 2.9)
    assert not stays(reconciler, at + 60.0, 2.9), "no request takes so long"
    reconciler, at = unloaded_step()
    assert stays(reconciler, at, 2.9)
    assert not stays(reconciler, at + 1.0, at), "what began later knows of it"
    reconciler, at = unloaded_step()
    assert not stays(reconciler, at, inf)
    reconciler, at = unloaded_step(steps=())
    assert not stays(reconciler, at, 2.9), "no ensemble has it"
    reconciler, at = unloaded_step()
    reconciler.models.load("m", revision(["m/1/0@2"], 2), at)
    assert not stays(reconciler, at, 2.9), "runs use the next revision"


def test_steps_are_known_from_the_ensembles_that_were_loaded():
    reconciler, _ = unloaded_step(steps=())
    whole = msgspec.structs.replace(SPEC, name="e", steps=(EnsembleStep("m", "", {}, {}),))
    reconciler.models.load("e", Revision(2, [VersionRecord(whole, [])]), 3.1)
    assert reconciler.models.awaits_runs
