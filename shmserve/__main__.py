"""``python -m shmserve``."""

import sys

from shmserve.command_line import main

if __name__ == "__main__":
    sys.exit(main())
