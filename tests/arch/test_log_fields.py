"""Log lines have fields: no text of a log call has `key=value` in it."""

import ast
import re
from pathlib import Path

from shmserve.log_fields import ATTRIBUTE, LogFields, log_fields

ROOT = Path(__file__).parents[2] / "shmserve"
LEVELS = {"debug", "info", "warning", "error", "exception", "log"}
FIELD = re.compile(r"\b[a-z_]+=%")


def test_no_text_of_a_log_call_has_fields_in_it() -> None:
    found, named = [], set()
    for path in ROOT.rglob("*.py"):
        if "_generated" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in {"log_fields", "LogFields"}:
                named |= {keyword.arg for keyword in node.keywords}
            texts = (arg.value for arg in node.args if isinstance(arg, ast.Constant))
            if name in LEVELS and any(FIELD.search(str(text)) for text in texts):
                found.append(f"{path}:{node.lineno}")
    assert found == []
    assert set(LogFields.__annotations__) == named - {None}, "no field that no line has"


def test_no_two_fields_have_the_same_name_in_log_lines() -> None:
    fields = dict.fromkeys(LogFields.__annotations__)
    assert len(log_fields(**fields)[ATTRIBUTE]) == len(fields)
