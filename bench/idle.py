"""Cost of an idle service: `python -m bench.idle [MODELS ...]`.

For each number of models (each an `identity` in Python with one instance; 0: the shipped workers):
seconds from the start to ready, memory by kind of process as the kernel shares it out (PSS), and,
over `--seconds` of idling, how often each kind of process was woken and the processor time for
these wake-ups. Wake-ups are voluntary context switches of all threads: their number is the same on
a busy machine as on an idle machine.
"""

import argparse
import contextlib
import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from bench.cpu_time import role_of
from shmserve.testing.running_server import free_port

ROOT = Path(__file__).resolve().parents[1]
IDENTITY = ROOT / "workers" / "identity"
START_S, SETTLE_S, STOP_S = 120.0, 3.0, 30.0


class Service:
    """Server on its own port, with the settings as shipped."""

    def __init__(self, models, folder):
        self.run_dir = str(folder / "run")
        self._log = folder / "log"
        repository = ROOT / "workers"
        if models:
            repository = folder / "models"
            for number in range(models):
                _identity(repository / f"identity_{number:03}")
        self._port = free_port()
        grpc = free_port()
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SHMSERVE_")}
        environ |= {
            "SHMSERVE_RUN_DIR": self.run_dir,
            "SHMSERVE_HTTP_BIND": f"127.0.0.1:{self._port}",
            "SHMSERVE_GRPC_BIND": f"127.0.0.1:{grpc}",
            "SHMSERVE_MODEL_REPOSITORY": str(repository),
            # process titles would overwrite the run directory that marks the processes
            "SPT_NOENV": "1",
        }
        command = [sys.executable, "-m", "gunicorn", "-c", "gunicorn.conf.py", "shmserve.app"]
        began = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)
        try:
            self._wait(began + START_S)
        except BaseException:
            self.stop()
            raise
        self.ready_s = time.monotonic() - began

    def _wait(self, until):
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > until:
                tail = self._log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"the server did not get ready:\n{tail}")
            time.sleep(0.05)

    def _is_ready(self):
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=5)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def processes(self):
        """(folder below /proc, kind) of each process of the service."""
        mark = f"SHMSERVE_RUN_DIR={self.run_dir}".encode()
        for entry in filter(str.isdigit, os.listdir("/proc")):
            folder = Path("/proc", entry)
            # another user's process, or a process that has ended
            with contextlib.suppress(OSError):
                if mark in (folder / "environ").read_bytes().split(b"\0"):
                    yield (
                        folder,
                        role_of((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()),
                    )

    def stop(self):
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def _identity(folder):
    shutil.copytree(IDENTITY, folder, ignore=shutil.ignore_patterns("__pycache__"))
    config = folder / "config.pbtxt"
    config.write_text(config.read_text().replace('"identity"', f'"{folder.name}"'))


def memory(processes):
    """Return MiB by kind of process: PSS, and the part of PSS that no other process has (both
    private)."""
    found = defaultdict(lambda: [0, 0.0, 0.0])
    for folder, role in processes:
        with contextlib.suppress(OSError):
            lines = (line.split() for line in (folder / "smaps_rollup").read_text().splitlines())
            kib = {words[0]: int(words[1]) for words in lines if words[0].endswith(":")}
            row = found[role]
            row[0] += 1
            row[1] += kib["Pss:"] / 1024
            row[2] += (kib["Private_Clean:"] + kib["Private_Dirty:"]) / 1024
    return dict(found)


def activity(processes):
    """(wake-ups, seconds of processor time) by thread and kind, since each began."""
    found = {}
    for folder, role in processes:
        with contextlib.suppress(OSError):
            for thread in (folder / "task").iterdir():
                with contextlib.suppress(OSError):
                    status = (thread / "status").read_text()
                    wakes = int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
                    ns = int((thread / "schedstat").read_text().split()[0])
                    name = (thread / "comm").read_text().strip()
                    found[role, thread.name, name] = wakes, ns / 1e9
    return found


def idle(processes, seconds):
    """By kind: wake-ups a second, percent of a processor, and the same wake-ups by thread."""
    before, began = activity(processes), time.monotonic()
    time.sleep(seconds)
    after, took = activity(processes), time.monotonic() - began
    found = defaultdict(lambda: [0.0, 0.0])
    threads = defaultdict(float)
    for key, (wakes, cpu) in after.items():
        earlier = before.get(key, (0, 0.0))
        row = found[key[0]]
        row[0] += (wakes - earlier[0]) / took
        row[1] += 100 * (cpu - earlier[1]) / took
        threads[key[0], key[2]] += (wakes - earlier[0]) / took
    return dict(found), dict(threads)


def measure(models, seconds, by_thread):
    with tempfile.TemporaryDirectory(prefix="bench-idle-") as folder:
        service = Service(models, Path(folder))
        try:
            time.sleep(SETTLE_S)
            processes = list(service.processes())
            held = memory(processes)
            spent, threads = idle(processes, seconds)
        finally:
            service.stop()
    what = f"{models} models" if models else "the shipped workers"
    print(f"{what}: ready in {service.ready_s:.2f} s, load {os.getloadavg()[0]:.1f}")
    rows = [(role, *held[role], *spent.get(role, (0.0, 0.0))) for role in sorted(held)]
    rows.append(("all", *(sum(row[place] for row in rows) for place in range(1, 6))))
    for role, count, pss, private, wakes, percent in rows:
        print(
            f"  {role:12} {count:3} processes  PSS {pss:7.1f} MiB, private {private:7.1f}"
            f"  {wakes:7.1f} wake-ups/s  {percent:6.2f} % of a processor"
        )
    if by_thread:
        for (role, name), wakes in sorted(threads.items(), key=lambda item: -item[1])[:20]:
            print(f"    {wakes:7.1f}/s {role}: {name}")
    sys.stdout.flush()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", type=int, nargs="*", default=[0, 1, 60])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--threads", action="store_true", help="show which threads were woken")
    arguments = parser.parse_args()
    for models in arguments.models:
        measure(models, arguments.seconds, arguments.threads)


if __name__ == "__main__":
    main()
