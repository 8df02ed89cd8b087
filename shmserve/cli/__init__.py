"""The commands of `shmserve`, one module each; `shmserve.command_line` finds them."""

from shmserve.command_line import main

__all__ = ["main"]
