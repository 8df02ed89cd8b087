"""Runner for scripts of a GRPS project, such as test.py, with `grps_framework` importable."""

import os
import runpy
import sys

from shmserve.grps.executor import framework


def main() -> None:
    """Run the script named by the first argument; the other arguments are for the script."""
    if len(sys.argv) < 2:
        sys.exit("usage: python -m shmserve.grps SCRIPT [ARGUMENT...]")
    framework.install()
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
