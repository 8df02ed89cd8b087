"""``python -m shmserve.cluster.service_child PARENT``: the server, which ends with who started it.

It becomes ``shmserve serve`` in this process; the kernel sends that SIGTERM when the thread
that started it is gone, however it went.
"""

from __future__ import annotations

import os
import signal
import sys

from shmserve.transport.processes import end_with_parent


def main() -> None:
    """Never returns."""
    end_with_parent(signal.SIGTERM)
    if os.getppid() != int(sys.argv[1]):  # it went before it could be watched
        sys.exit(1)
    os.execv(sys.executable, [sys.executable, "-m", "shmserve", "serve"])


if __name__ == "__main__":
    main()
