"""Real processes, killed: which process notices, which is replaced, and what is left."""

import copy
import signal

import pytest

from shmserve.core.registry import ModelState
from shmserve.shm.registry_page import RegistryReader
from tests.integration.process_harness import Tree
from tests.running_server import is_running, wait_until

MODELS = {"alpha": {"count": 2}, "beta": {}}


@pytest.fixture
def tree(tmp_path):
    with Tree(tmp_path, MODELS) as tree:
        tree.wait_ready()
        wait_until(lambda: len(executors(tree)) == 3, "all executors")
        yield tree


def executors(tree):
    return {**tree.live("alpha"), **tree.live("beta")}


def test_the_tree_comes_up_and_can_be_shown(tree):
    roles = sorted(row["role"] for row in tree.rows())
    assert roles == ["cli", "coordinator", "executor", "executor", "executor", "supervisor"]
    held = {row["role"]: row["held_bytes"] for row in tree.rows()}
    assert held["executor"] == 1000
    models = tree.rows("models")
    assert [row["instance"] for row in models] == ["alpha/1/0", "alpha/1/1", "beta/1/0"]
    assert {row["state"] for row in models} == {"READY"}
    wait_until(lambda: sum("busy_ms" in row for row in tree.rows("queues")) == 3, "all answers")


def test_a_killed_executor_is_replaced(tree):
    before = executors(tree)
    tree.kill(before["alpha/1/0"])
    wait_until(lambda: executors(tree).get("alpha/1/0") != before["alpha/1/0"], "unpublication")
    wait_until(lambda: "alpha/1/0" in executors(tree), "another executor")
    after = executors(tree)
    assert after["alpha/1/1"] == before["alpha/1/1"]
    assert after["beta/1/0"] == before["beta/1/0"]


def test_a_killed_coordinator_is_replaced_and_remembers(tree):
    before, generation = executors(tree), tree.snapshot().generation
    coordinator = tree.pid("coordinator")
    tree.kill(coordinator)
    assert executors(tree) == before  # the data path does not notice
    wait_until(lambda: tree.pid("coordinator") not in (0, coordinator), "another coordinator")
    wait_until(lambda: len(tree.rows()) == 6, "all links")
    wait_until(lambda: tree.snapshot().generation > generation, "a publication")
    assert executors(tree) == before
    tree.kill(before["beta/1/0"])
    wait_until(lambda: executors(tree).get("beta/1/0", 0) not in (0, before["beta/1/0"]), "restart")


def test_a_killed_supervisor_is_replaced_and_adopts(tree):
    before, coordinator = executors(tree), tree.pid("coordinator")
    tree.replace("supervisor")
    wait_until(lambda: len(tree.rows()) == 6, "its link")
    assert tree.pid("coordinator") == coordinator
    assert executors(tree) == before
    tree.kill(before["alpha/1/1"])  # not a child of the supervisor
    wait_until(
        lambda: executors(tree).get("alpha/1/1", 0) not in (0, before["alpha/1/1"]), "restart"
    )
    assert len([p for p in tree.members() if p != tree.master.pid]) == 5


def test_supervisor_and_coordinator_killed_together(tree):
    before = executors(tree)
    tree.replace("supervisor", "coordinator")
    wait_until(lambda: len(tree.rows()) == 6, "all links")
    assert executors(tree) == before
    tree.kill(before["beta/1/0"])
    wait_until(lambda: executors(tree).get("beta/1/0", 0) not in (0, before["beta/1/0"]), "restart")


def test_with_the_master_everything_ends(tree):
    members = tree.members()
    tree.kill(tree.master.pid)
    wait_until(lambda: not any(is_running(pid) for pid in members), "everything's end")
    names = {path.name for path in (tree.folder / "run").iterdir()}
    assert names - {"history"} == {"master.lock", "supervisor.lock", "coordinator.lock", "events"}


def test_with_master_and_supervisor_everything_ends(tree):
    members = tree.members()
    tree.kill(tree.master.pid)
    tree.kill(tree.pid("supervisor"))
    wait_until(lambda: not any(is_running(pid) for pid in members), "everything's end")


def test_a_service_can_start_where_one_was_killed(tree):
    epoch = tree.snapshot().epoch
    tree.kill(tree.master.pid)
    tree.start()  # at once: the new service waits for the old processes to end

    def another():
        tree.reader = RegistryReader(tree.run_dir)  # a reader lives as long as the service
        return tree.ready() and tree.snapshot().epoch != epoch

    wait_until(another, "the next service")


def test_a_clean_stop_drains_and_leaves_nothing(tree):
    members = tree.members()
    tree.master.send_signal(signal.SIGTERM)
    assert tree.master.wait(60) == 0
    assert not any(is_running(pid) for pid in members)
    names = {path.name for path in (tree.folder / "run").iterdir()}
    assert names - {"history"} == {"master.lock", "supervisor.lock", "coordinator.lock", "events"}


def test_a_second_service_in_the_run_directory_is_refused(tree):
    other = copy.copy(tree)
    other.start()
    assert other.master.wait(60) != 0
    said = (tree.folder / "log").read_text()
    assert f"run_dir: {tree.run_dir} is in use by another server" in said
    assert "set another (SHMSERVE_RUN_DIR)" in said
    assert tree.ready()


def test_an_executor_that_hangs_is_killed_and_replaced(tmp_path):
    with Tree(tmp_path, {"slow": {"parameters": {"ignore_stop": "yes"}}}) as tree:
        tree.wait_ready()
        before = tree.live("slow")
        flag = tmp_path / "run" / "busy-slow-1-0"
        flag.touch()
        wait_until(lambda: tree.live("slow") != before, "the watchdog")
        flag.unlink()
        wait_until(lambda: tree.live("slow").get("slow/1/0", 0) not in (0, before["slow/1/0"]), "x")
        log = tmp_path / "log"
        wait_until(lambda: "a request ran longer than" in log.read_text(), "the line")


def test_a_model_that_cannot_be_loaded_is_not_tried_again(tmp_path):
    with Tree(tmp_path, {"bad": {"parameters": {"load": "fail"}}, "good": {}}) as tree:
        wait_until(lambda: tree.snapshot() and tree.snapshot().complete, "the scan")

        def entry():
            return tree.snapshot().models["bad"]["1"]

        wait_until(lambda: entry().state is ModelState.UNAVAILABLE, "the failure")
        assert entry().reason == "the model says no"
        wait_until(lambda: tree.live("good"), "the other model")
        log = tmp_path / "log"
        # An executor that has not ended yet could tell the next coordinator that it loads
        wait_until(lambda: "executor ended instance=bad" in log.read_text(), "its end")
        tree.kill(tree.pid("coordinator"))
        wait_until(lambda: len(tree.rows()) == 4, "another coordinator")
        assert entry().state is ModelState.UNAVAILABLE
        assert log.read_text().count("started executor instance=bad") == 1


def test_a_model_that_never_loads_is_given_up(tmp_path):
    with Tree(
        tmp_path, {"stuck": {"parameters": {"load": "hang"}}}, {"SHMSERVE_LOAD_TIMEOUT_S": "1"}
    ) as tree:
        wait_until(
            lambda: (
                (snapshot := tree.snapshot())
                and "stuck" in snapshot.models  # the first publication has no models
                and snapshot.models["stuck"]["1"].reason
            ),
            "the reason",
        )
        entry = tree.snapshot().models["stuck"]["1"]
        assert entry.state is ModelState.UNAVAILABLE
        assert entry.reason == "the model did not load within 1 s"
        log = tmp_path / "log"
        wait_until(lambda: "executor ended instance=stuck" in log.read_text(), "its end")
        assert log.read_text().count("started executor instance=stuck") == 1
