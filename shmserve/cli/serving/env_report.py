"""Report on a new environment, made by ``shmserve env build``."""

import platform
import sys
from argparse import ArgumentParser
from importlib import metadata

from shmserve.executor.process import __main__  # noqa: F401 (an executor imports the module)


def main() -> int:
    """Print Python's version and the packages. Return 1, and print the reason instead, if
    executors cannot run in the environment."""
    parser = ArgumentParser()
    parser.add_argument("--fault", required=True)
    if reason := parser.parse_args().fault:
        print(f"the environment cannot be used: {reason}")
        return 1
    found = sorted(f"{each.name} {each.version}" for each in metadata.distributions())
    print(f"Python {platform.python_version()} with {', '.join(found)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
