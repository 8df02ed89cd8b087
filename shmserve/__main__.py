"""``python -m shmserve``."""

import os
import sys

from shmserve import build_id
from shmserve.command_line import main

if __name__ == "__main__":
    build_id.pass_on_tree(os.environ)
    sys.exit(main())
