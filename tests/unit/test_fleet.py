"""The coordinator's decisions, event by event."""

import pytest

from shmserve.core.control.effects import AnswerGrant, Desire, Dismiss, Publish
from shmserve.core.control.lifecycle import State
from shmserve.core.control.reconciler import GRACE_S, Fleet
from shmserve.core.control.records import Incarnation, InstanceRecord, VersionRecord
from shmserve.core.memory.budget import Ledger
from shmserve.core.registry import ModelState
from shmserve.errors import ProtocolViolation
from shmserve.tensor.spec import ModelSpec

SPEC = ModelSpec("m", "1", "", "python", 0, (), ())
NAMES = ["m/1/0", "m/1/1"]


def make(names=NAMES):
    fleet = Fleet(Ledger(1000, 100), execute_timeout_s=2.0, load_timeout_s=10.0)
    fleet.models.load("m", incarnation(names), 0.0, required=True)
    fleet.scanned({})
    return fleet


def incarnation(names=NAMES, number=1):
    return Incarnation(number, [VersionRecord(SPEC, [InstanceRecord(name) for name in names])])


def bring_up(fleet, name="m/1/0", pid=10, process="executor-1-aa"):
    fleet.started(name, pid, 1.0)
    fleet.hello(process, "executor", pid, 0, name, 1.5)
    return fleet.loaded(process, SPEC, f"{process}.sock", 2.0)


def entry(fleet):
    return fleet.snapshot("e").models["m"]["1"]


def test_a_version_is_ready_with_its_first_instance_and_takes_its_spec():
    fleet = make()
    assert entry(fleet).state is ModelState.LOADING
    fleet.started("m/1/0", 10, 1.0)
    fleet.hello("executor-1-aa", "executor", 10, 0, "m/1/0", 1.5)
    complete = ModelSpec("m", "1", "onnxruntime_onnx", "onnxruntime", 8, (), ())
    assert Publish() in fleet.loaded("executor-1-aa", complete, "executor-1-aa.sock", 2.0)
    assert entry(fleet).state is ModelState.READY
    assert entry(fleet).spec == complete
    assert [i.name for i in entry(fleet).instances] == ["m/1/0"]


def test_an_executor_that_disconnects_is_unpublished_at_once():
    fleet = make()
    bring_up(fleet)
    assert Publish() in fleet.gone("executor-1-aa", 3.0)
    assert entry(fleet).state is ModelState.READY
    assert entry(fleet).instances == ()
    fleet.exited("m/1/0", 10, "signal SIGKILL", 3.1)
    assert entry(fleet).reason == "its executor ended: signal SIGKILL"
    bring_up(fleet, pid=11, process="executor-2-bb")
    assert [i.pid for i in entry(fleet).instances] == [11]


def test_a_failed_load_is_definitive():
    fleet = make(["m/1/0"])
    fleet.started("m/1/0", 10, 1.0)
    fleet.hello("executor-1-aa", "executor", 10, 0, "m/1/0", 1.5)
    assert Desire() in fleet.load_failed("executor-1-aa", "no such file", 2.0)
    fleet.gone("executor-1-aa", 2.1)
    fleet.exited("m/1/0", 10, "status 1", 2.2)
    assert fleet.desired() == []
    assert (entry(fleet).state, entry(fleet).reason) == (ModelState.UNAVAILABLE, "no such file")


def test_one_failed_instance_of_two_leaves_the_version_ready():
    fleet = make()
    bring_up(fleet)
    fleet.hello("executor-2-bb", "executor", 11, 0, "m/1/1", 2.0)
    fleet.load_failed("executor-2-bb", "out of memory", 3.0)
    assert entry(fleet).state is ModelState.READY
    assert fleet.desired() == ["m/1/0"]


def test_the_watchdog_takes_an_instance_out_until_it_has_ended():
    fleet = make(["m/1/0"])
    bring_up(fleet)
    assert fleet.busy("executor-1-aa", 2000, 5.0) == []
    assert Desire() in fleet.busy("executor-1-aa", 2001, 5.0)
    assert fleet.desired() == []
    assert entry(fleet).instances == ()
    assert fleet.busy("executor-1-aa", 9000, 6.0) == []
    fleet.gone("executor-1-aa", 7.0)
    assert Desire() in fleet.exited("m/1/0", 10, "signal SIGKILL", 7.1)
    assert fleet.desired() == ["m/1/0"]


def test_an_instance_that_never_loads_is_given_up():
    fleet = make(["m/1/0"])
    fleet.started("m/1/0", 10, 1.0)
    fleet.hello("executor-1-aa", "executor", 10, 0, "m/1/0", 1.5)
    assert fleet.tick(10.0) == []
    effects = fleet.tick(10.1)
    assert Desire() in effects
    assert [e.process for e in effects if isinstance(e, Dismiss)] == ["executor-1-aa"]
    assert (fleet.desired(), fleet.hurried()) == ([], ["m/1/0"])
    assert entry(fleet).state is ModelState.UNAVAILABLE
    assert "10 s" in entry(fleet).reason
    assert fleet.loaded("executor-1-aa", SPEC, "executor-1-aa.sock", 10.2) == []


def test_an_instance_that_had_loaded_is_never_given_up():
    fleet = make(["m/1/0"])
    bring_up(fleet)
    for turn in range(5):
        fleet.gone("executor-1-aa", 3.0 + turn)
        fleet.exited("m/1/0", 10, "signal SIGKILL", 3.1 + turn)
        fleet.started("m/1/0", 10, 3.2 + turn)
    assert fleet.desired() == ["m/1/0"]
    assert Desire() in fleet.tick(100.0)  # it is stopped, and wanted again when it has ended
    assert fleet.hurried() == ["m/1/0"]
    fleet.exited("m/1/0", 10, "signal SIGKILL", 101.0)
    assert fleet.desired() == ["m/1/0"]


def test_processes_that_end_while_they_load_are_started_a_bounded_number_of_times():
    fleet = make(["m/1/0"])
    for turn in range(3):
        assert fleet.desired() == ["m/1/0"]
        fleet.started("m/1/0", 10 + turn, 1.0)
        fleet.hello(f"executor-{turn}-aa", "executor", 10 + turn, 0, "m/1/0", 1.5)
        fleet.gone(f"executor-{turn}-aa", 1.6)
        fleet.exited("m/1/0", 10 + turn, "signal SIGSEGV", 1.7)
    assert fleet.desired() == []
    assert entry(fleet).state is ModelState.UNAVAILABLE
    assert "3 times" in entry(fleet).reason
    assert "SIGSEGV" in entry(fleet).reason


def test_an_old_process_end_does_not_touch_the_new():
    fleet = make(["m/1/0"])
    bring_up(fleet)
    assert fleet.exited("m/1/0", 9, "signal SIGKILL", 3.0) == []
    assert len(entry(fleet).instances) == 1


def test_of_two_executors_the_supervisors_latest_stays():
    fleet = make(["m/1/0"])
    bring_up(fleet)
    effects = fleet.started("m/1/0", 20, 3.0)
    assert [e.process for e in effects if isinstance(e, Dismiss)] == ["executor-1-aa"]
    assert fleet.loaded("executor-1-aa", SPEC, "executor-1-aa.sock", 3.1) == []
    fleet.gone("executor-1-aa", 3.2)
    fleet.hello("executor-2-bb", "executor", 20, 0, "m/1/0", 3.3)
    fleet.loaded("executor-2-bb", SPEC, "executor-2-bb.sock", 3.4)
    assert [i.pid for i in entry(fleet).instances] == [20]


def test_a_rival_nobody_started_is_dismissed():
    fleet = make(["m/1/0"])
    bring_up(fleet)
    effects = fleet.hello("executor-9-zz", "executor", 99, 0, "m/1/0", 3.0)
    assert [e.process for e in effects if isinstance(e, Dismiss)] == ["executor-9-zz"]
    assert [i.pid for i in entry(fleet).instances] == [10]


def test_what_a_dead_executor_had_still_sent_is_not_credited_to_its_successor():
    fleet = make(["m/1/0"])
    fleet.hello("executor-1-aa", "executor", 10, 0, "m/1/0", 1.0)
    fleet.exited("m/1/0", 10, "signal SIGKILL", 1.1)
    fleet.hello("executor-2-bb", "executor", 11, 0, "m/1/0", 1.2)
    assert fleet.loaded("executor-1-aa", SPEC, "executor-1-aa.sock", 1.3) == []
    assert entry(fleet).instances == ()


def test_a_failed_load_counts_even_if_the_end_of_its_process_overtakes_it():
    fleet = make(["m/1/0"])
    fleet.started("m/1/0", 10, 0.5)
    fleet.hello("executor-1-aa", "executor", 10, 0, "m/1/0", 1.0)
    fleet.exited("m/1/0", 10, "status 1", 1.1)
    assert Desire() in fleet.load_failed("executor-1-aa", "no such file", 1.2)
    assert fleet.desired() == []
    assert entry(fleet).reason == "no such file"


def test_an_executor_cannot_change_its_instance():
    fleet = make()
    bring_up(fleet)
    again = restarted(fleet)
    with pytest.raises(ProtocolViolation, match="ran another instance"):
        again.hello("executor-1-aa", "executor", 10, 0, "m/1/1", 100.1)


def test_an_executor_of_nothing_known_is_dismissed():
    effects = make().hello("executor-9-zz", "executor", 99, 0, "other/1/0", 3.0)
    assert effects == [Dismiss("executor-9-zz", "not wanted")]


def test_an_executor_that_does_not_say_what_it_runs_is_known_by_its_pid():
    fleet = make()
    fleet.started("m/1/1", 31, 1.0)
    fleet.hello("executor-1-aa", "executor", 31, 0, "", 1.5)
    assert fleet.instances["m/1/1"].state is State.LOADING


def restarted(fleet):
    again = make()
    again.restore(fleet.snapshot("e"), 100.0)
    return again


def test_after_a_restart_what_was_published_stays_for_the_grace():
    fleet = make()
    bring_up(fleet)
    bring_up(fleet, "m/1/1", 11, "executor-2-bb")
    again = restarted(fleet)
    assert again.awaiting
    assert len(entry(again).instances) == 2
    again.hello("executor-1-aa", "executor", 10, 0, "m/1/0", 100.5)
    again.loaded("executor-1-aa", SPEC, "executor-1-aa.sock", 100.5)
    again.instances["m/1/1"].deadline = again.instances["m/1/0"].deadline = 200.0
    assert again.tick(100.0 + GRACE_S - 0.1) == []
    assert Publish() in again.tick(100.0 + GRACE_S)
    assert not again.awaiting
    assert [i.name for i in entry(again).instances] == ["m/1/0"]
    assert again.desired() == NAMES


def test_a_new_supervisor_adopts_what_has_a_link_and_forgets_the_rest():
    fleet = make()
    bring_up(fleet)
    fleet.started("m/1/1", 11, 1.0)  # by a supervisor that died before its executor said hello
    assert Desire() in fleet.hello("supervisor-2-aa", "supervisor", 5, 0, "", 3.0)
    assert fleet.running() == [("m/1/0", 10, "executor-1-aa")]
    assert fleet.instances["m/1/1"].pid == 0


def test_a_stopped_instance_whose_supervisor_died_is_wanted_again():
    fleet = make(["m/1/0"])
    bring_up(fleet)
    fleet.busy("executor-1-aa", 5000, 3.0)
    fleet.gone("executor-1-aa", 4.0)
    assert fleet.desired() == []
    fleet.hello("supervisor-2-aa", "supervisor", 5, 0, "", 5.0)
    assert fleet.desired() == ["m/1/0"]


def test_a_drain_is_published_and_told_to_executors_once():
    fleet = make()
    bring_up(fleet)
    effects = fleet.drain()
    assert Publish() in effects
    assert Dismiss("executor-1-aa", "drain") in effects
    assert fleet.snapshot("e").draining
    assert fleet.drain() == []


def test_what_a_dead_process_held_is_free():
    fleet = make()
    fleet.hello("http-1-aa", "http", 1, 900, "", 0.0)
    fleet.hello("http-2-bb", "http", 2, 0, "", 0.0)
    fleet.ledger.grant("http-2-bb", 1, 500, 1.0)
    assert fleet.gone("http-1-aa", 1.1) == [AnswerGrant("http-2-bb", 1, True)]


@pytest.mark.parametrize(
    "wrong",
    [
        lambda fleet: fleet.loaded("http-1-aa", SPEC, "x.sock", 1.0),
        lambda fleet: fleet.loaded("executor-1-aa", SPEC, "../x.sock", 1.0),
        lambda fleet: fleet.started("nothing/1/0", 1, 1.0),
        lambda fleet: fleet.hello("http-3-cc", "http", 3, -1, "", 1.0),
    ],
)
def test_what_the_protocol_forbids_is_refused(wrong):
    fleet = make()
    fleet.hello("http-1-aa", "http", 1, 0, "", 0.0)
    fleet.hello("executor-1-aa", "executor", 10, 0, "m/1/0", 0.0)
    with pytest.raises(ProtocolViolation):
        wrong(fleet)
