"""Where the code of a model is wrong, with paths: for operators. Clients are told none."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path

_MOST_FILES, _MOST_CAUSES = 100, 10


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


def place(ex: BaseException | None, directory: str) -> str:
    """The last line of the model's own code that an exception, or what has caused it, came
    through, or where it is no Python; empty: none."""
    found = ""
    for _ in range(_MOST_CAUSES):
        if ex is None:
            break
        if isinstance(ex, SyntaxError) and ex.filename:
            return f"{ex.filename}, line {ex.lineno}: "
        for frame in traceback.extract_tb(ex.__traceback__):
            if frame.filename.startswith(f"{directory}/"):
                found = f"{frame.filename}, line {frame.lineno}: "
        ex = ex.__cause__ or ex.__context__
    return found
