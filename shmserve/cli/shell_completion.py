"""Command ``shmserve completion SHELL``: prints a script for the shell to source."""

import argparse

from shmserve import command_line
from shmserve.errors import ConfigError


def main(arguments: argparse.Namespace) -> int:
    """Print the script and return the exit status. Raise ConfigError if shtab is not installed."""
    try:
        import shtab
    except ImportError:
        raise ConfigError("completion needs shtab: pip install 'shmserve[cli]'") from None
    print(shtab.complete(command_line.parser(), arguments.shell))
    return 0
