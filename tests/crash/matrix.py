"""Fault matrix: the cost of each fault of each process, in each stage of a service under load.

    python -m tests.crash.matrix [--only REGEX] [--results FILE]

Prints a JSON line for each cell, and a table in the end. `--only` selects cells by name, such as
`serving, keeper, kill`. Cells with a line in the file of `--results` are not run again. A service
whose keeper has ended is started again, as a service manager would. Exit status 1 if an answer was
wrong, if anything hung, or if anything is left over.
"""

import argparse
import contextlib
import http.client
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shmserve.transport import rundir
from shmserve.transport.processes import stat_of
from tests.crash import faults
from tests.crash.load import DOORS, GrpcClient, Load, Verdict
from tests.crash.reload import repository
from tests.crash.restart import LastingRegions
from tests.crash.soak import SPREAD, slots
from tests.running_server import (
    ROOT,
    RunningServer,
    is_running,
    open_fds,
    segments_left,
    wait_until,
)
from tests.servers import only

FAULTS = {
    "kill": faults.killed,
    "stop": faults.stopped,
    "segfault": faults.crashed,
    "out of memory": faults.starved,
}
FAULT_S = {"stop": 20.0, "out of memory": 5.0}  # longest duration; at most to the process's end
STARTING = "starting"
STAGES = ("serving", STARTING, "handover", "handover ends")
ROLES = (
    *("master", "http worker", "grpc", "supervisor", "coordinator", "template"),
    "executor echo",
)
WHOLE = Counter({role: 1 for role in ("keeper", *ROLES, "executor pair", "executor slow")})
WHOLE |= {"http worker": 2, "executor pair": 2}
SIZES = (10, 1000, 20_000)
LOAD_S = 3.0  # for the model `slow` to load, while a service starts or reloads
SETTLED_S = 2.5  # full service counts if it lasts
SILENT_S = 2.0  # longest time without a right answer of a protocol that is served
PATIENCE_S = 90.0  # from the fault to full service and the end of a reload
LEFT_S = 45.0  # for replaced processes to end
STEADY = ("keeper", "master", "supervisor", "coordinator")
HUNG = re.compile(r"\b504\b|DEADLINE_EXCEEDED|timed out|does not end")
SLOW = """
import time
class Model:
    def __init__(self, context):
        time.sleep(float(open({path!r}).read()))
    def infer(self, request):
        return {{"OUT": request.input("IN")}}
"""


@dataclass
class Cell:
    """A fault of a process in a stage, and its costs.

    Attributes:
        process: role; in a handover, ``old`` or ``new`` and a role.
        lost: requests without an answer, by kind.
        full_s: seconds from the fault to full service.
        told: output of `shmserve reload`, and `told_s`, seconds from the fault to its end.
    """

    stage: str
    process: str
    fault: str
    lost: dict[str, int] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    full_s: float = 0.0
    told: str = ""
    told_s: float = 0.0
    left: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"{self.stage}, {self.process}, {self.fault}"

    @property
    def failed(self) -> bool:
        return bool(self.wrong or self.hung or self.left)

    def row(self) -> list[str]:
        lost = ", ".join(f"{count} {kind}" for kind, count in sorted(self.lost.items())) or "0"
        told = f"{self.told_s:g}: {self.told.removeprefix('shmserve: ')}" if self.told else ""
        found = (lost, *("; ".join(each) or "0" for each in (self.wrong, self.hung)))
        return [*self.name.split(", "), *found, f"{self.full_s:g}", "; ".join(self.left), told]


HEADS = (
    *("stage", "process", "fault", "lost", "wrong", "hung", "s until full service", "left over"),
    "s until told",
)


def cells() -> Iterator[Cell]:
    """Yield all cells."""
    both = [f"{age} {role}" for age in ("old", "new") for role in ROLES]
    for fault in FAULTS:
        for stage in STAGES:
            processes = ("handover", *both) if stage.startswith("handover") else ROLES
            yield from (Cell(stage, process, fault) for process in ("keeper", *processes))


def roles(server: RunningServer, living: bool = False) -> Counter[str]:
    """Return the number of processes of each role; `living`: without stopped processes."""
    found: Counter[str] = Counter()
    for pid, title in server.processes().items():
        match = re.match(r"shmserve: (http worker|executor \w+|\w+)", title)
        stopped = living and (stat := stat_of(pid)) is not None and stat.state == "T"
        found[match[1] if match and not stopped else "other"] += 1
    return found


class Rig:
    """The service of one cell after another, and a new service after a failed cell."""

    def __init__(self, folder: Path) -> None:
        self.models = repository(folder / "models")
        self._seconds = folder / "seconds"
        (self.models / "other").rename(self.models / "slow")
        (self.models / "slow/1/model.py").write_text(SLOW.format(path=str(self._seconds)))
        self.server: RunningServer | None = None
        self.fds: dict[str, int] = {}

    def slow(self, seconds: float) -> None:
        """Set for how long the model `slow` loads from now on."""
        self._seconds.write_text(str(seconds))

    def serving(self) -> RunningServer:
        """Return the service, in full service."""
        if self.server is None:
            self.slow(0.0)
            server = self.starting()
            wait_until(lambda: not lacks(server, None), "no full service")
            server.wait_linked()
            self.fds = self.most_fds()
        assert self.server is not None
        return self.server

    def starting(self) -> RunningServer:
        """Return a service that has just begun to start."""
        assert self.server is None
        settings: dict[str, Any] = only("echo,pair,slow")
        settings |= {"watchdog_s": 3, "drain_timeout_s": 3, "reload": "handover"}
        settings |= {"http_workers": 2, "pool_bytes": 256 << 20}
        self.server = RunningServer(self.models, kept=True, **settings)
        self.server.start(wait_ready=False)
        return self.server

    def most_fds(self) -> dict[str, int]:
        """Return the largest number of descriptors of a process, by role."""
        assert self.server is not None
        counts = {role: [open_fds(pid) for pid in self.server.pids(role)] for role in STEADY}
        return {role: max(numbers, default=0) for role, numbers in counts.items()}

    def end(self) -> list[str]:
        """Stop the service; return what is left of it."""
        server, self.server = self.server, None
        if server is None:
            return []
        try:
            status = server.stop()
            left = [*server.leaks(), *rundir.generations(server.run_dir)]
            return [f"status {status}", *left] if status else left
        except TimeoutError as ex:
            return [str(ex)]
        finally:
            server.kill_all()


def lacks(server: RunningServer, doors: "Doors | None") -> str:
    """Return what full service lacks now."""
    if missing := WHOLE - roles(server, living=True):
        return f"processes: {dict(missing)}"
    try:
        if server.request("GET", "/v2/health/ready", timeout_s=SILENT_S)[0] != 200:
            return "readiness"
    except (OSError, http.client.HTTPException):
        return "readiness"
    return doors.silent() if doors is not None else ""


class Doors:
    """Time of the last right answer over each protocol."""

    def __init__(self, verdict: Verdict) -> None:
        self._verdict = verdict
        self._seen = dict.fromkeys(DOORS, (0, time.monotonic()))

    def silent(self) -> str:
        """Return which protocols have given no right answer for `SILENT_S`."""
        now, silent = time.monotonic(), []
        for door, (count, at) in self._seen.items():
            if self._verdict.counts[door] != count:
                self._seen[door] = self._verdict.counts[door], now
            elif now - at > SILENT_S:
                silent.append(door)
        return f"answers: {silent}" if silent else ""


class Trial:
    """One run of a cell."""

    def __init__(self, cell: Cell, rig: Rig) -> None:
        self.cell = cell
        self.rig = rig
        self.reload: subprocess.Popen[str] | None = None
        self.served = ""  # run directory of the generation that served before

    def run(self) -> None:
        """Run the cell; on a failure, end the service, whose log goes to stderr."""
        cell, rig = self.cell, self.rig
        if cell.stage == STARTING:
            cell.left += rig.end()
            rig.slow(LOAD_S)
        self.server = rig.starting() if cell.stage == STARTING else rig.serving()
        logged = len(self.server.log())
        try:
            self._under_load()
            cell.left += self._left()
        except Exception as ex:
            cell.hung.append(f"{type(ex).__name__}: {ex}"[:300])
        finally:
            if self.reload is not None and self.reload.poll() is None:
                self.reload.kill()
        if cell.failed:
            print(cell, self.server.log()[logged:][-20_000:], file=sys.stderr)
            cell.left += rig.end()

    def _under_load(self) -> None:
        load = Load(self.server, 2, SIZES, more=(GrpcClient, LastingRegions))
        verdict = load.verdict
        verdict.disturbed_until = math.inf
        doors = None if self.cell.stage == STARTING else Doors(verdict)
        with load if doors else contextlib.nullcontext():
            if doors:
                wait_until(lambda: not verdict.silent(), "no answers before the fault")
            self._befall(self._target(), doors)
        if not doors:
            with load:
                wait_until(lambda: not verdict.silent(), "no answers after the start")
        self._judge(verdict)

    def _befall(self, pid: int, doors: Doors | None) -> None:
        """Let the fault befall a process, and wait for full service and the end of a reload."""
        cell, fault = self.cell, contextlib.ExitStack()
        begun = lacked_at = time.monotonic()
        with fault:
            fault.enter_context(FAULTS[cell.fault](pid))
            over_at = begun + FAULT_S.get(cell.fault, 0.0)
            while True:
                now = time.monotonic()
                if now > over_at or not is_running(pid):
                    fault.close()
                    if cell.fault == "out of memory":
                        for each in self.server.processes():
                            faults.feed(each)
                    over_at = 0.0
                if lacking := lacks(self.server, doors):
                    lacked_at = time.monotonic()
                answered = self._answered(begun)
                if not over_at and answered and now - lacked_at > SETTLED_S:
                    break
                if now > begun + PATIENCE_S:
                    cell.hung.append(lacking or "the reload")
                    break
                self._start_again()
                time.sleep(0.1)
        cell.full_s = round(lacked_at - begun, 1)

    def _answered(self, begun: float) -> bool:
        """Return whether no reload is under way."""
        if self.reload is None or self.cell.told:
            return True
        if (status := self.reload.poll()) is None:
            return False
        self.cell.told_s = round(time.monotonic() - begun, 1)
        self.cell.told = self.reload.communicate()[0].strip() or f"status {status}"
        taken = rundir.serving(self.server.run_dir) != self.served
        if taken != (status == 0):
            self.cell.wrong.append(f"told {status}, although taken over is {taken}")
        return True

    def _start_again(self) -> None:
        server = self.server
        if server.master is None or server.master.poll() is None:
            return
        with contextlib.suppress(TimeoutError):
            wait_until(lambda: not server.processes(), "its end", LEFT_S)
        self.cell.left += [f"process {title}" for title in server.processes().values()]
        server.kill_all()
        server.start(wait_ready=False)

    def _target(self) -> int:
        """Begin the stage; return the pid of the process for the fault."""
        server, before = self.server, set(self.server.processes())
        match = re.fullmatch("(old |new |)(.*)", self.cell.process)
        assert match
        age, role = match[1].strip(), match[2]
        if self.cell.stage.startswith("handover"):
            self.rig.slow(LOAD_S)
            self.served = rundir.serving(server.run_dir)
            self.reload = subprocess.Popen(
                [sys.executable, "-m", "shmserve", "reload"],
                cwd=ROOT,
                env=server.environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            wait_until(lambda: set(server.pids("executor slow")) - before, "no new executor")
        if self.cell.stage == "handover ends":
            wait_until(lambda: rundir.serving(server.run_dir) != self.served, "not taken over")

        def found() -> list[int]:
            pids = server.pids(role)
            return [pid for pid in pids if not age or (pid in before) == (age == "old")]

        wait_until(found, f"no {self.cell.process}")
        return found()[0]

    def _judge(self, verdict: Verdict) -> None:
        self.cell.lost = {
            kind: count
            for kind, count in verdict.counts.items()
            if kind not in ("right", "wrong") and not kind.startswith("over ")
        }
        late = [text for text in (*verdict.wrong, *verdict.closed) if HUNG.search(text)]
        self.cell.hung += late[:3]
        self.cell.wrong += [text[:300] for text in verdict.wrong if text not in late][:3]

    def _left(self) -> list[str]:
        """Return what is left over of the load and of replaced processes."""
        server, left = self.server, []
        for what, gone, found in (
            ("slots in use", lambda: slots(server) == 0, lambda: server.show("slots")[:3]),
            ("processes", lambda: roles(server) == WHOLE, lambda: dict(roles(server) - WHOLE)),
            ("descriptors", lambda: not self._more_fds(), self._more_fds),
        ):
            try:
                wait_until(gone, what, LEFT_S)
            except TimeoutError:
                left.append(f"{what}: {found()}")
        serving = os.path.basename(rundir.serving(server.run_dir))
        generations = set(rundir.generations(server.run_dir)) - {serving}
        return [*left, *segments_left(), *generations]

    def _more_fds(self) -> dict[str, int]:
        found, first = self.rig.most_fds(), self.rig.fds
        self.rig.fds = first or found
        return {role: n for role, n in found.items() if n > self.rig.fds[role] + SPREAD}


def table(done: Iterable[Cell]) -> str:
    rows = [HEADS, ["---"] * len(HEADS), *(cell.row() for cell in done)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def run(wanted: Iterable[Cell], results: Path | None = None) -> list[Cell]:
    """Run cells, without those in `results`, and return all."""
    earlier: dict[str, Cell] = {}
    for line in results.read_text().splitlines() if results and results.exists() else ():
        cell = Cell(**json.loads(line))
        earlier[cell.name] = cell
    done = []
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(Path(folder))
        try:
            for cell in wanted:
                if cell.name in earlier:
                    done.append(earlier[cell.name])
                    continue
                Trial(cell, rig).run()
                done.append(cell)
                line = json.dumps(asdict(cell))
                print(line, flush=True)
                if results:
                    with results.open("a") as file:
                        file.write(line + "\n")
        finally:
            left = rig.end()
    if done:
        done[-1].left += left
    return done


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.matrix")
    parser.add_argument("--only", default="", help="regular expression for names of cells")
    parser.add_argument("--results", type=Path, help="file with earlier cells, to be continued")
    options = parser.parse_args()
    done = run((cell for cell in cells() if re.search(options.only, cell.name)), options.results)
    print(table(done))
    return 1 if any(cell.failed for cell in done) else 0


if __name__ == "__main__":
    sys.exit(main())
