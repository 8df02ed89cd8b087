"""``python -m shmserve``."""

import os
import sys

from shmserve.command_line import main


def _share_tree() -> None:
    """Let further processes find the server's code if it was found in the working directory, as of
    a source tree: they import nothing else from there (`-P`)."""
    tree = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if not sys.flags.safe_path and sys.path[0] == tree and tree not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [tree, *paths]))


if __name__ == "__main__":
    _share_tree()
    sys.exit(main())
