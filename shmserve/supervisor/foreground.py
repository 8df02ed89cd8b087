"""``python -m shmserve.supervisor.foreground``: gunicorn's program, but never as a daemon.

The keeper needs a master that is the process it started. gunicorn's `daemon` may come from the
command line, GUNICORN_CMD_ARGS and configuration files, so only gunicorn knows the final value.
"""

import os

from gunicorn.app.wsgiapp import WSGIApplication

from shmserve.supervisor import launch


class _Foreground(WSGIApplication):  # type: ignore[misc]
    def chdir(self) -> None:
        os.chdir(self.cfg.chdir)  # gunicorn also imports from there, where models may lie

    def run(self) -> None:
        if self.cfg.daemon:
            launch.failed("daemon: `shmserve serve` stays in the foreground; leave it out")
        super().run()


if __name__ == "__main__":
    _Foreground("%(prog)s [OPTIONS] [APP_MODULE]", prog="gunicorn").run()
