"""Service process: ``python -m shmserve.cluster.service_child PARENT`` runs the server until the
starting thread ends.

The process becomes ``shmserve serve``. The kernel sends SIGTERM when the starting thread ends, for
any reason.
"""

import os
import signal
import sys

from shmserve.transport.processes import end_with_parent


def main() -> None:
    """Start the server in place of this process. Never returns."""
    end_with_parent(signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):  # the parent ended before the kernel began to watch
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-P", "-m", "shmserve", "serve"])


if __name__ == "__main__":
    main()
