"""Sources of systemd's watchdog: the master's and the coordinator's beats."""

from shmserve.supervisor.processes.life_watch import LifeWatch
from shmserve.transport import rundir


def test_a_silent_master_or_a_coordinator_that_never_comes_back_is_unhealthy(tmp_path):
    run_dir = str(tmp_path)
    life = LifeWatch(run_dir, 2.0, 5.0)
    master, coordinator = rundir.lock(run_dir, "master"), rundir.lock(run_dir, "coordinator")
    assert all(life.healthy(now) for now in range(10)), "nobody has begun"
    master.acquire()
    coordinator.acquire()

    def healthy_at(times, *beating):
        return [now for now in times if all(b.beat() for b in beating) and life.healthy(now)]

    assert healthy_at(range(10, 20), master, coordinator) == [*range(10, 20)]
    assert healthy_at(range(20, 30), coordinator) == [*range(20, 25)]  # 5 s after the last at 19
    assert healthy_at(range(30, 50), master) == [*range(30, 38)]  # 4 times 2 s after 29
    master.release()
    coordinator.release()
