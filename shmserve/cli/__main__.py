"""Entry point of ``python -m shmserve.cli``."""

import sys

from shmserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
