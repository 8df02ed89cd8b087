"""Search for code in a `.pt2` archive, before torch reads the archive.

torch.export.load evaluates the text of symbolic sizes as Python, and unpickles constants of other
kinds than tensors. Saved programs rarely need more than arithmetic and tensors. For everything
else, the service must allow model code. torch itself refuses pickles among the sample inputs if the
environment variable of `exported` is set.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterator
from typing import Any

NATIVE = "holds native code"  # a package of AOTInductor
_PACKAGE = "data/aotinductor/"  # folder of native code
# Names of functions are capitalised in sympy, and lower-case in Python. `*+`: no backtracking
_EXPRESSION = re.compile(
    r"(?:(?:Symbol|Float)\('[\w.+-]+'(?:, \w+=(?:True|False|\d+))*\)"
    r"|[A-Z][A-Za-z]*+|[a-z]++\d+|int_oo|\d++(?:\.\d+)?|[\s()*/+%,<>=&|~-])*+"
)
_TENSOR = re.compile(r"(?:tensor|weight)_\d+")


def code_in(path: str) -> str:
    """Return a description of code in an archive, as the predicate of a sentence, or "". Raise
    ValueError, OSError or BadZipFile for other files than archives."""
    with zipfile.ZipFile(path) as archive:
        names = archive.namelist()
        if any(_PACKAGE in name for name in names):
            return NATIVE
        if len({name.lower() for name in names}) < len(names):  # torch may read another member
            raise ValueError("two members of the archive have the same name")
        for name in names:
            if name.lower().endswith(".json"):
                for fields in _objects(json.loads(archive.read(name))):
                    if reason := _reason(fields):
                        return reason
    return ""


def _objects(document: Any) -> Iterator[dict[str, Any]]:
    rest = [document]
    while rest:
        node = rest.pop()
        if isinstance(node, dict):
            yield node
            rest += node.values()
        elif isinstance(node, list):
            rest += node


def _reason(fields: dict[str, Any]) -> str:
    expression = fields.get("expr_str", "")
    if not isinstance(expression, str) or not _EXPRESSION.fullmatch(expression):
        return "holds code in the place of a size"
    path = fields.get("path_name", "tensor_0")
    if not isinstance(path, str) or not _TENSOR.fullmatch(path) or fields.get("use_pickle"):
        return "holds a pickle"
    return ""
