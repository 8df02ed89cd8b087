"""Where the code of a model is wrong, with paths: for operators. Clients are told none."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path

_MOST_FILES = 100


def problem(folder: Path) -> str:
    """What is no Python among the files of a version's folder; empty: nothing. None is run."""
    for path in sorted(folder.glob("*.py"))[:_MOST_FILES]:
        try:
            with warnings.catch_warnings(action="ignore"):
                compile(path.read_bytes(), str(path), "exec", dont_inherit=True)
        except SyntaxError as ex:
            return f"{path}, line {ex.lineno}: {ex.msg}"
        except (OSError, ValueError) as ex:
            return f"{path}: {ex}"
    return ""


def place(ex: BaseException, directory: str) -> str:
    """The last line of the model's own code that an exception came through, or where it is no
    Python; empty: none."""
    if isinstance(ex, SyntaxError) and ex.filename:
        return f"{ex.filename}, line {ex.lineno}: "
    frames = traceback.extract_tb(ex.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(f"{directory}/")]
    return f"{own[-1].filename}, line {own[-1].lineno}: " if own else ""
