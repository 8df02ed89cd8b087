"""Start and stop of the servers that are compared."""

import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from shmserve.testing.running_server import free_port

ROOT = Path(__file__).resolve().parents[1]
WORKER = "shmserve.frontends.http.server.worker.ConnectionWorker"
START_S, STOP_S = 120, 60

RIVALS = {
    "trivial": ["-k", WORKER, "bench.rivals.trivial_app"],
    "trivial-gthread": ["-k", "gthread", "--threads", "8", "bench.rivals.trivial_app"],
    "queue": ["-k", WORKER, "bench.rivals.queue_app"],
    "dirty": [
        *["-k", WORKER, "--dirty-workers", "1", "--dirty-timeout", "120"],
        *["--dirty-app", "bench.rivals.dirty_app:Model", "bench.rivals.dirty_app"],
    ],
}
NAMES = ("shmserve", *RIVALS)


class Server:
    """Server on its own port, with `workers` HTTP workers."""

    def __init__(self, name, workers, directory):
        self.name = name
        self.port = free_port()
        self.address = ["--port", str(self.port)]
        self._log = directory / f"{name}.log"
        self.run_dir = tempfile.mkdtemp(prefix=f"bench-{name}-")
        command = [sys.executable, "-m", "gunicorn"]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("SHMSERVE_")}
        environ["SHMSERVE_RUN_DIR"] = self.run_dir
        # titles would overwrite the mark by which `cpu_time` finds the processes
        environ["SPT_NOENV"] = "1"
        # gunicorn's dirty arbiter keeps a pid file in this folder
        environ["TMPDIR"] = self.run_dir
        if name == "shmserve":
            environ["SHMSERVE_HTTP_BIND"] = f"127.0.0.1:{self.port}"
            environ["SHMSERVE_HTTP_WORKERS"] = str(workers)
            environ["SHMSERVE_GRPC_PROCESSES"] = "0"
            environ["SHMSERVE_MODEL_REPOSITORY"] = str(ROOT / "workers")
            command += ["-c", "gunicorn.conf.py", "shmserve.app"]
        else:
            command += [
                "-c",
                "bench/rivals/gunicorn.conf.py",
                "--no-control-socket",
                "-b",
                f"127.0.0.1:{self.port}",
            ]
            command += ["--workers", str(workers), "--keep-alive", "75", *RIVALS[name]]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=log, stderr=log)
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def _wait(self):
        give_up = time.monotonic() + START_S
        paths = ["/v2/health/ready"]
        if self.name == "shmserve":
            paths += ["/v2/models/identity/ready", "/v2/models/noop/ready"]
        while paths:
            if self._process.poll() is not None or time.monotonic() > give_up:
                tail = self._log.read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{self.name} did not start ({paths[0]}):\n{tail}")
            if self._status(paths[0]) == 200:
                paths.pop(0)
            else:
                time.sleep(0.1)

    def _status(self, path):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return 0
        finally:
            connection.close()

    def stop(self):
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self.run_dir, ignore_errors=True)
