"""The interop matrix: gRPC clients of seven libraries, and three proxies, against a real server.

    python -m tests.interop --messages 100000 --idle 3600

Each client is a program that runs one cell and prints `ok`, or what went wrong in a sentence.
Prints and writes a table; exits 1 if a cell fails.
"""

import argparse
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.interop.clients import CLIENTS, Client, Missing
from tests.interop.proxies import PROXIES, proxy
from tests.needs import ROOT
from tests.running_server import RunningServer

CELLS = {
    "unary": "a call with 4 KiB each way, and one with 16 MiB",
    "parallel": "500 calls of 4 KiB, 50 at a time on one connection",
    "stream": "all messages on one stream, answered in order",
    "decoupled": "1,000 answers to one message of a stream",
    "sequence": "a sequence of ten requests on a stream",
    "metadata": "a value of 8 KiB, and one with `-bin`",
    "blanks": "a value with blanks at both ends",
    "deadline": "DEADLINE_EXCEEDED after 0.2 s, and a call on the same connection",
    "cancel": "a stream and a call cancelled, and a call on the same connection",
    "half_close": "a stream closed right after its messages, and one without messages",
    "gzip": "compressed messages, of a call and of a stream",
    "errors": "NOT_FOUND with its text, and UNIMPLEMENTED, without any message",
    "reflection": "the list of services",
    "health": "Check, Check of an unknown service, Watch",
    "idle": "an open stream, then a connection without calls, idle for half of the time each",
    "drain": "calls in flight finish when the server ends, and the client finds its successor",
}
TOGETHER = ("idle", "drain")  # all clients at once
PROXY_CLIENT = "go"
_WATCHDOG_S = 1200.0
_MODELS = ROOT / "tests/repositories/interop"


class Run:
    """A cell of one client, from start to verdict."""

    def __init__(self, client: Client, target: str, cell: str, given: argparse.Namespace) -> None:
        words = (target, cell, str(given.messages), str(given.idle))
        self.began = time.monotonic()
        self._give_up = self.began + _WATCHDOG_S + given.idle
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [*client.command, *words],
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | client.environ,
        )
        self._reader = threading.Thread(target=self._read_output, daemon=True)
        self._reader.start()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())
        self._lines.put("")
        self._lines.put("")  # for `line` and `verdict`

    def line(self) -> str:
        """Return the next line of output; empty at the end, or without output in time."""
        try:
            return self._lines.get(timeout=max(0.1, self._give_up - time.monotonic()))
        except queue.Empty:
            return ""

    def verdict(self) -> str:
        """Return `ok`, or the failure."""
        last = ""
        while line := self.line():
            last = line
        if self.process.poll() is None and not self._ends():
            self.process.kill()
            last = f"no end after {time.monotonic() - self.began:.0f} s"
        self._reader.join(30)
        self.process.wait(30)
        with self._errors:
            self._errors.seek(0)
            errors = self._errors.read().strip().splitlines() or ["no word"]
        return last if last not in ("", "running") else errors[-1]

    def _ends(self) -> bool:
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            return False
        return True


class Matrix:
    """All cells."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given = given
        self.rows: dict[str, dict[str, str]] = {}  # column -> cell -> verdict
        self._ready: dict[str, tuple[Client, str]] = {}  # column -> program and target
        self._server = self._new_server()

    def _new_server(self, **settings: Any) -> RunningServer:
        return RunningServer(
            _MODELS,
            grpc_header_forward_pattern="x-.*",
            grpc_min_ping_interval_s=5,
            grpc_keepalive_time_s=20,
            grpc_keepalive_without_calls="true",
            drain_timeout_s=60,
            **settings,
        )

    def run(self, clients: dict[str, Client | str]) -> None:
        with ExitStack() as stack:
            stack.enter_context(self._server)
            for column, client in clients.items():
                self._add(column, client, self._server.grpc_address)
            behind = clients.get(PROXY_CLIENT, f"the client {PROXY_CLIENT} is not run")
            for name in self._given.proxy:
                try:
                    target = stack.enter_context(proxy(name, self._server.grpc_address))
                except Missing as ex:
                    self._add(name, str(ex), "")
                else:
                    self._add(name, behind, target)
            self._cells(stack)

    def _add(self, column: str, client: Client | str, target: str) -> None:
        self.rows[column] = {}
        if isinstance(client, str):
            self.rows[column] = dict.fromkeys(self._given.cell, f"not run: {client}")
        else:
            self._ready[column] = client, target

    def _cells(self, stack: ExitStack) -> None:
        for cell in [c for c in self._given.cell if c not in TOGETHER]:
            for column in self._ready:
                self._finish(cell, self._start(cell, [column]))
        if "idle" in self._given.cell:
            self._finish("idle", self._start("idle", [*self._ready]))
        if "drain" in self._given.cell:
            runs = self._start("drain", [*self._ready])
            for run in runs.values():
                run.line()
            self._server.stop()
            place = {"run_dir": self._server.run_dir, "grpc_bind": self._server.grpc_address}
            stack.enter_context(self._new_server(**place))
            self._finish("drain", runs)

    def _start(self, cell: str, columns: list[str]) -> dict[str, Run]:
        return {
            column: Run(client, target, cell, self._given)
            for column in columns
            for client, target in [self._ready[column]]
            if not self._left_out(cell, column, client)
        }

    def _left_out(self, cell: str, column: str, client: Client) -> bool:
        if cell in client.leaves_out:
            self.rows[column][cell] = f"not run: {client.leaves_out[cell]}"
        return cell in client.leaves_out

    def _finish(self, cell: str, runs: dict[str, Run]) -> None:
        for column, run in runs.items():
            verdict = self.rows[column][cell] = run.verdict()
            seconds = time.monotonic() - run.began
            print(f"{column} {cell} {seconds:.1f} s: {verdict}", flush=True)

    def failures(self) -> list[str]:
        return [
            f"{column}, {cell}: {verdict}"
            for column, verdicts in self.rows.items()
            for cell, verdict in verdicts.items()
            if verdict != "ok" and not verdict.startswith("not run: ")
        ] + [f"left behind: {leak}" for leak in self._server.leaks()]

    def table(self, given: argparse.Namespace) -> str:
        """Markdown: a row for each cell, a column for each client, and what is not ok in words."""
        head = f"{given.messages} messages, {given.idle:g} s idle\n\n"
        lines = [f"| | {' | '.join(self.rows)} |", f"|---{'|---' * len(self.rows)}|"]
        notes = []
        for cell in given.cell:
            told = [verdicts.get(cell, "") for verdicts in self.rows.values()]
            short = [verdict.partition(":")[0] for verdict in told]
            fine = ("ok", "not run")
            words = " | ".join(s if s in fine else "**FAILS**" for s in short)
            lines.append(f"| {cell} | {words} |")
            notes += [
                f"- {cell}, {column}: {verdict[:600]}"
                for column, verdict in zip(self.rows, told, strict=True)
                if verdict != "ok"
            ]
        return "\n".join([head + "\n".join(lines), "", *notes, ""])


def built(names: list[str]) -> dict[str, Client | str]:
    """Return client programs by name; a text gives the reason for a missing program."""
    made: dict[str, Client | str] = {}
    for name in names:
        try:
            made[name] = CLIENTS[name]()
        except Missing as ex:
            made[name] = str(ex)
        print(f"{name}: {made[name] if isinstance(made[name], str) else 'built'}", flush=True)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--client", action="append", choices=[*CLIENTS], help="default: all")
    add("--proxy", action="append", choices=[*PROXIES, "none"], help="default: all")
    add("--cell", action="append", choices=[*CELLS], help="default: all")
    add("--messages", type=int, default=100_000, help="of the long stream")
    add("--idle", type=float, default=60.0, help="seconds; 3600 in the full form")
    add("--output", type=Path, default=ROOT / "interop.md", help="the tables, as Markdown")
    given = parser.parse_args()
    given.cell = given.cell or [*CELLS]
    given.proxy = [name for name in given.proxy or PROXIES if name != "none"]
    clients = built(given.client or [*CLIENTS])
    matrix = Matrix(given)
    matrix.run(clients)
    failures = matrix.failures()
    cells = "\n".join(f"- {cell}: {text}" for cell, text in CELLS.items())
    text = "\n".join(["# Interop matrix\n", cells, "", matrix.table(given)])
    given.output.write_text(text)
    print(text, *failures, sep="\n")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
