"""``python -m shmserve.coordinator``: command line of the coordinator process. The supervisor
starts it; people never do."""

from __future__ import annotations

import argparse
import sys

from setproctitle import setproctitle

from shmserve import config, repository
from shmserve.coordinator import coordinator_loop
from shmserve.coordinator.assembly import Launch
from shmserve.observe import logs


def main() -> int:
    parser = argparse.ArgumentParser(prog="shmserve.coordinator")
    parser.add_argument("--process-id", required=True)
    parser.add_argument("--master-fd", type=int, required=True)
    parser.add_argument("--epoch", required=True)
    parser.add_argument("--grpc-unserved", default="", help="reason why no gRPC process serves")
    arguments = parser.parse_args()
    settings = config.load()
    setproctitle("shmserve: coordinator")
    logs.setup("coordinator", settings.log_level, settings.log_format)
    run_dir = config.run_dir(settings)
    started = (arguments.process_id, arguments.epoch, arguments.master_fd, arguments.grpc_unserved)
    launch = Launch(settings, run_dir, *started)
    return coordinator_loop.run(launch, repository)


if __name__ == "__main__":
    sys.exit(main())
