"""Stand-in for systemd around a service: sockets, notifications, and the descriptor store.

Does what the units in deploy/systemd ask of systemd: listens, passes the sockets to the service,
receives notifications, and keeps stored descriptors for the next start.
"""

import array
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

from shmserve.transport.processes import adopt_orphans, has_ended, pidfd_open
from tests.running_server import ROOT, WATCHDOG_S, RunningServer, wait_until

MOST_STORED = 4096  # FileDescriptorStoreMax=
# Runs in the process that becomes the service. Arguments: descriptors by name, and the command.
_BECOME = """
import os, sys
from shmserve.supervisor.generations.activation import exec_with
named = [text.rpartition("=") for text in sys.argv[1].split()]
exec_with(sys.argv[2:], dict(os.environ), [(name, int(fd)) for name, _, fd in named])
"""
_CMSG_BYTES = socket.CMSG_SPACE(64 * 4)


class Manager:
    """One service, which runs from `start` to `stop` with the settings of `server`.

    Adopts orphans, as systemd does, so the process that runs it should have no other children.
    """

    def __init__(self, server: RunningServer) -> None:
        self.server = server
        self.main = 0
        self.status = ""
        self.ready = threading.Event()
        self.said: list[str] = []
        self.stored: list[tuple[str, int]] = []
        adopt_orphans()
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path = os.path.join(server.run_dir, "notify")
        self._notify.bind(path)
        server.environ["NOTIFY_SOCKET"] = path
        with contextlib.suppress(FileNotFoundError):
            os.unlink(server.unix_path)
        http = socket.create_server((server.http_host, server.http_port), backlog=1024)
        unix = socket.create_server(server.unix_path, family=socket.AF_UNIX, backlog=1024)
        host, _, port = server.grpc_address.rpartition(":")
        grpc = socket.create_server((host, int(port)), backlog=1024)
        self._listeners = [("http", http), ("http", unix), ("grpc", grpc)]
        self._ended = False
        self._hearing = threading.Thread(target=self._hear, daemon=True)
        self._hearing.start()

    # ------------------------------------------------------------------ the unit

    def start(self) -> None:
        """ExecStart; until READY=1."""
        self.ready.clear()
        passed = [(n, sock.fileno()) for n, sock in self._listeners] + self.stored
        aside = [os.dup(fd) for _, fd in passed]
        named = [f"{name}={fd}" for (name, _), fd in zip(passed, aside, strict=True)]
        words = [sys.executable, "-m", "shmserve", "serve"]
        with self.server.log_path.open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", _BECOME, " ".join(named), *words],
                cwd=ROOT,
                env=self.server.environ,
                pass_fds=aside,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        for fd in aside:
            os.close(fd)
        self.main = process.pid
        if not self.ready.wait(WATCHDOG_S):
            raise TimeoutError(f"not ready: {self.status}\n{self.server.log()[-6000:]}")

    def stop(self) -> None:
        """Send SIGTERM to the main process, await its end; others end as with KillMode=mixed."""
        self._end_main()
        wait_until(self._none_left, f"processes are left: {self.server.processes()}")

    def restart(self) -> None:
        """``systemctl restart``."""
        self.stop()
        self.start()

    def reload(self) -> tuple[int, str]:
        """Return the exit status and output of ExecReload, as ``systemctl reload`` runs it."""
        done = subprocess.run(
            [sys.executable, "-m", "shmserve", "reload"],
            cwd=ROOT,
            env=self.server.environ,
            capture_output=True,
            text=True,
            timeout=4 * WATCHDOG_S,
        )
        return done.returncode, (done.stdout + done.stderr).strip()

    def settle(self, generations: int = 1) -> None:
        """Until the generation before has ended."""
        wait_until(lambda: len(self.server.pids("master")) == generations, "an old master stays")
        self._reap()

    def close(self) -> None:
        """Stop the unit for good: close listening sockets and stored descriptors."""
        self._ended = True
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as last:
            last.sendto(b"", self.server.environ["NOTIFY_SOCKET"])
        self._hearing.join()
        self._notify.close()
        os.unlink(self.server.environ["NOTIFY_SOCKET"])
        for _, sock in self._listeners:
            sock.close()
        os.unlink(self.server.unix_path)
        for _, fd in self.stored:
            os.close(fd)

    def _end_main(self) -> None:
        pidfd = pidfd_open(self.main)
        assert pidfd is not None
        os.kill(self.main, signal.SIGTERM)
        ended = has_ended(pidfd, WATCHDOG_S)
        os.close(pidfd)
        assert ended, f"the main process does not end\n{self.server.log()[-6000:]}"
        self._reap()

    def _none_left(self) -> bool:
        self._reap()
        return not self.server.processes()

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                continue

    # ------------------------------------------------------------- notifications

    def _hear(self) -> None:
        while not self._ended:
            data, ancillary, _, _ = self._notify.recvmsg(4096, _CMSG_BYTES)
            fds = array.array("i")
            for level, kind, sent in ancillary:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    fds.frombytes(sent[: len(sent) - len(sent) % fds.itemsize])
            self._told(dict(_assignments(data.decode())), list(fds))

    def _told(self, said: dict[str, str], fds: list[int]) -> None:
        self.said += [f"{key}={value}" for key, value in said.items()]
        name = said.get("FDNAME", "")
        if said.get("FDSTORE") == "1":
            kept = fds[: MOST_STORED - len(self.stored)]
            self.stored += [(name, fd) for fd in kept]
            fds = fds[len(kept) :]
        elif said.get("FDSTOREREMOVE") == "1":
            fds += [fd for given, fd in self.stored if given == name]
            self.stored = [(given, fd) for given, fd in self.stored if given != name]
        for fd in fds:
            os.close(fd)
        if "MAINPID" in said:
            self.main = int(said["MAINPID"])
        self.status = said.get("STATUS", self.status)
        if said.get("READY") == "1":
            self.ready.set()


def _assignments(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        key, _, value = line.partition("=")
        yield key, value
