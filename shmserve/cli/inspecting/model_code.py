"""Errors in a model's code, with paths. Only for operators: clients must not see paths."""

from __future__ import annotations

import traceback
import warnings
from pathlib import Path

_MOST_FILES, _MOST_CAUSES = 100, 10


def problem(folder: Path) -> str:
    """Return the first syntax error in the Python files of a version's folder, or "". Compiles the
    files without running them."""
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
    """Return the place of an exception or its causes in the model's code: the innermost line, or
    the line of a syntax error. Return "" if no line of the model is involved."""
    location = ""
    for _ in range(_MOST_CAUSES):
        if ex is None:
            break
        if isinstance(ex, SyntaxError) and ex.filename:
            return f"{ex.filename}, line {ex.lineno}: "
        for frame in traceback.extract_tb(ex.__traceback__):
            if frame.filename.startswith(f"{directory}/"):
                location = f"{frame.filename}, line {frame.lineno}: "
        ex = ex.__cause__ or ex.__context__
    return location
