"""``python -m shmserve.coordinator``: started by the supervisor, never by hand."""

from __future__ import annotations

import argparse
import sys

from setproctitle import setproctitle

from shmserve import config, repository
from shmserve.coordinator.service import Coordinator
from shmserve.observe import logs


def main() -> int:
    parser = argparse.ArgumentParser(prog="shmserve.coordinator")
    parser.add_argument("--process-id", required=True)
    parser.add_argument("--master-fd", type=int, required=True)
    parser.add_argument("--epoch", required=True)
    arguments = parser.parse_args()
    settings = config.load()
    setproctitle("shmserve: coordinator")
    logs.setup("coordinator", settings.log_level)
    return Coordinator(
        settings,
        config.run_dir(settings),
        arguments.process_id,
        arguments.epoch,
        arguments.master_fd,
        repository,
    ).run()


if __name__ == "__main__":
    sys.exit(main())
