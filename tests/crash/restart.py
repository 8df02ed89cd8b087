"""Restart drill: the service is restarted and reloaded under load, as systemd would do it.

    python -m tests.crash.restart --restarts 10 --reloads 10

Clients send numbered tensors over HTTP (kept-alive connections, and a new connection per request),
gRPC, registered memory, and `shmserve.client` (lanes, without lanes, asyncio). No client retries,
except for the retries within `shmserve.client`. Each request must get a right answer. In between,
a new generation that is killed while it loads and a generation with a broken model must change
nothing. Prints a JSON line for each step and a summary: requests sent, answered and lost, and the
longest time between two answers of one client. Exit status 1 if a request was lost or the service
left anything behind.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import shmserve.client
from shmserve.client import aio
from shmserve.transport import rundir
from tests.crash.load import (
    GrpcClient,
    LaneClient,
    Load,
    LoadClient,
    Verdict,
    outputs_of,
)
from tests.crash.manager import Manager
from tests.crash.region_load import RegionClient
from tests.crash.reload import lost, repository
from tests.running_server import RunningServer, binary_request, open_fds, wait_until

SIZES = (10, 1000, 20_000)
DRAIN_IDLE_S = 3.0  # longer than any of these clients pauses
BETWEEN_S = 1.0


class NewConnections(LoadClient):
    """A connection for each request, by urllib."""

    def send(self, count: int) -> tuple[str, bool]:
        model, array, wanted = self.next(count)
        body, headers = binary_request(array)
        url = self.server.base_url + f"/v2/models/{model}/infer"
        try:
            with urllib.request.urlopen(
                urllib.request.Request(url, body, headers), timeout=30
            ) as answer:
                data, length = answer.read(), int(answer.headers["Inference-Header-Content-Length"])
        except OSError as ex:
            return self.closed("new connection", ex)
        return self.judge("over new connections", outputs_of(data, length)["OUT"], wanted)


class WithoutLanes(LaneClient):
    """Client with sealed memory that is named in requests over HTTP."""

    lanes = False


class LastingRegions(RegionClient):
    """Client whose memory is registered once and must stay known."""

    def close(self) -> None:
        if self.work.stop.is_set() and self.connection is not None:
            for part in ("in", "out"):  # the client of the next step uses the same names
                self.connection.unregister(f"load-{self.number}-{part}")
        super().close()


class AioClient(LoadClient):
    """Client with `shmserve.client.aio`, in a separate event loop."""

    client: aio.AsyncClient | None = None

    def loop(self) -> None:
        self.stack = contextlib.AsyncExitStack()
        with asyncio.Runner() as self.runner:
            super().loop()

    def send(self, count: int) -> tuple[str, bool]:
        model, array, wanted = self.next(count)
        try:
            result = self.runner.run(self._infer(model, array))
        except shmserve.client.InferenceError as ex:
            return self.closed(f"aio {ex.status}", ex.message)
        return self.judge("over aio", result["OUT"].tobytes(), wanted)

    async def _infer(self, model: str, array: np.ndarray) -> Any:
        if self.client is None:
            connected = aio.connect(f"unix:{self.server.unix_path}", timeout=30)
            self.client = await self.stack.enter_async_context(connected)
        return await self.client.infer(model, {"IN": array})

    def close(self) -> None:
        if self.client is not None:
            self.runner.run(self.stack.aclose())
            self.client = None


MORE = (NewConnections, GrpcClient, LastingRegions, WithoutLanes, AioClient)


class Drill:
    """The steps, each under load. `verdict`: of all."""

    def __init__(self, manager: Manager, models: Path) -> None:
        self.manager = manager
        self.server = manager.server
        self.models = models
        self.verdict = Verdict()
        self.wrong: list[str] = []
        # descriptors of each generation's master, once no other generation runs
        self.fds: list[int] = []

    def step(self, name: str, action: Callable[[], None]) -> None:
        """Run an action under load and report the answers."""
        begun = time.monotonic()
        with Load(self.server, 2, SIZES, more=MORE) as verdict:
            time.sleep(BETWEEN_S)
            action()
            took = time.monotonic() - begun - BETWEEN_S
            time.sleep(BETWEEN_S)
        self.verdict.add(verdict)
        told = {"step": name, "seconds": round(took, 1), **counted(verdict)}
        print(json.dumps(told), flush=True)

    def reload(self) -> None:
        main = self.manager.main
        status, said = self.manager.reload()
        self.expect(status == 0, f"a reload failed: {said}")
        self.manager.settle()
        self.expect(self.manager.main == main, "another main process")
        self.fds.append(open_fds(self.server.pids("master")[0]))
        self.expect(self.fds[-1] <= self.fds[0], f"descriptors of masters: {self.fds}")

    def killed_while_loading(self) -> None:
        """Kill the new master with SIGKILL as soon as it exists."""
        before, masters = rundir.serving(self.server.run_dir), self.server.pids("master")
        results: list[tuple[int, str]] = []
        asking = threading.Thread(target=lambda: results.append(self.manager.reload()))
        asking.start()
        # Earlier, the fork that hands over may still have the title of its master
        wait_until(lambda: len(self.server.pids("coordinator")) == 2, "no new coordinator")
        (new,) = set(self.server.pids("master")) - set(masters)
        os.kill(new, signal.SIGKILL)
        asking.join()
        self.refused(results[0], before, "its master ended before it served")

    def broken_model(self) -> None:
        """Reload with a model that cannot be loaded any more."""
        before = rundir.serving(self.server.run_dir)
        path = self.models / "pair" / "1" / "model.py"
        text = path.read_text()
        path.write_text("import nothing_of_that_name\n")
        try:
            result = self.manager.reload()
        finally:
            path.write_text(text)
        self.refused(result, before, "nothing_of_that_name")

    def broken_settings(self) -> None:
        """Reload with an invalid setting, which the new generation detects."""
        before = rundir.serving(self.server.run_dir)
        path = Path(self.server.environ["SHMSERVE_CONFIG"])
        path.write_text('http_restricted_api = "x:y=z"\n')
        try:
            result = self.manager.reload()
        finally:
            path.write_text("")
        self.refused(result, before, "http_restricted_api: unknown restricted api 'x'")

    def refused(self, result: tuple[int, str], before: str, why: str) -> None:
        """Check that a reload changed nothing and reported the reason, also to systemd."""
        status, said = result
        self.expect(status == 2 and why in said, f"not refused for {why}: {status} {said}")
        self.expect(why in self.manager.status, f"not in the status: {self.manager.status}")
        self.expect(rundir.serving(self.server.run_dir) == before, "another generation serves")
        self.manager.settle()

    def expect(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)


def counted(verdict: Verdict) -> dict[str, Any]:
    """Return the counts of a load: requests sent, answered and lost."""
    answered = len(verdict.gaps)
    problems = lost(verdict)
    return {
        "sent": answered + len(problems),
        "answered": answered,
        "lost": len(problems),
        "longest_gap_s": round(max(verdict.gaps, default=0.0), 3),
        "ways": dict(verdict.counts),
        "problems": problems[:3],
    }


def drill(
    restarts: int, reloads: int, folder: Path, short: bool = False, show_log: bool = False
) -> list[str]:
    """Run the whole drill and return the problems."""
    fds = open_fds(os.getpid())
    server = RunningServer(
        repository(folder / "models"),
        http_workers=2,
        reload="handover",
        drain_idle_s=DRAIN_IDLE_S,
        pool_bytes=256 << 20,
    )
    (folder / "settings.toml").touch()
    server.environ["SHMSERVE_CONFIG"] = str(folder / "settings.toml")
    manager = Manager(server)
    try:
        manager.start()
        steps = Drill(manager, folder / "models")
        for _ in range(restarts):
            steps.step("restart", manager.restart)
        for _ in range(reloads):
            steps.step("reload", steps.reload)
        if not short:
            steps.step("kill -9 of a new generation", steps.killed_while_loading)
            steps.step("reload with a broken model", steps.broken_model)
            steps.step("reload with broken settings", steps.broken_settings)
        manager.stop()
        left, text = server.leaks(), server.log()
        manager.close()
    except BaseException:
        print(server.log()[-8000:], file=sys.stderr)
        raise
    finally:
        server.kill_all()
    if (more := open_fds(os.getpid()) - fds) > 0:
        left.append(f"{more} descriptors of this process")
    print(json.dumps({"step": "all", **counted(steps.verdict), "left": left, "wrong": steps.wrong}))
    if show_log:
        print(text, file=sys.stderr)
    return [*steps.wrong, *lost(steps.verdict), *left]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--restarts", type=int, default=10)
    parser.add_argument("--reloads", type=int, default=10)
    parser.add_argument("--short", action="store_true", help="nothing but these")
    parser.add_argument("--log", action="store_true", help="print the service's log at the end")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wrong = drill(
            arguments.restarts, arguments.reloads, Path(folder), arguments.short, arguments.log
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
