"""Flight recorder: events are reported in order, while their processes live and afterwards."""

import json
import os
import signal
import stat
from pathlib import Path

from shmserve.observe import flight_recorder
from tests.running_server import wait_until
from tests.servers import SMALL, Server, only, run_shmserve

SETTINGS = SMALL | only("identity")
REFUSED = "request failed identity/1 bad_request"


def shown(server, *options):
    """Run `shmserve show events` as a separate program."""
    done = run_shmserve("show", "events", "--json", *options, environ=server.environ)
    return json.loads(done.stdout)


def lines(rows):
    return [f"{row['event']} {row['subject']} {row['text']}" for row in rows]


def wait_recorded(server, wanted, times):
    def seen():
        found = lines(flight_recorder.rows(server.run_dir, 1000))
        return sum(line.startswith(wanted) for line in found) >= times

    wait_until(seen, wanted)


def kill(pid):
    os.kill(pid, signal.SIGKILL)
    return pid


def test_refusals_and_deaths_are_shown_in_order_also_after_everything_was_killed():
    with Server(**SETTINGS) as server:
        wait_recorded(
            server, "model ready identity", 1
        )  # the coordinator gives the event its place in the order
        for _ in range(3):
            assert server.infer("identity", {"inputs": []})[0] == 400
        executor = kill(server.pids("executor id")[0])
        wait_recorded(server, "process started identity", 2)
        coordinator = kill(server.pids("coordinator")[0])
        wait_recorded(server, "process started coordinator", 2)
        alive = shown(server)
        server.kill_all()
        dead = shown(server)
        assert shown(server, "--limit", "2") == dead[-2:]
        files = list(Path(server.run_dir, "events").iterdir())
        server.start()  # for a clean end; earlier events are still reported
        assert {str(row) for row in dead} <= {str(row) for row in shown(server)}
    expected = [
        "process started coordinator",
        "model ready identity/1",
        REFUSED,
        f"process ended identity/1/0 pid {executor}: signal SIGKILL",
        "process started identity/1/0",
        f"process ended coordinator pid {coordinator}: signal SIGKILL",
        "process started coordinator",
    ]
    for rows in (alive, dead):
        assert [row["time"] for row in rows] == sorted(row["time"] for row in rows)
        left = iter(lines(rows))
        for wanted in expected:
            assert any(line.startswith(wanted) for line in left), (wanted, lines(rows))
        assert sum(row["count"] for row in rows if lines([row]) == [REFUSED]) == 3
        # Twice, and told once if the second time comes soon.
        assert any(line.startswith("service ready") for line in lines(rows))
    assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
