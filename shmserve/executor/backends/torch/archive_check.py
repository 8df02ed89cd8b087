"""Search for code in a `.pt2` archive, before torch reads the archive.

torch.export.load evaluates the text of symbolic sizes as Python, unpickles constants of other kinds
than tensors, calls any function of torch's modules that a graph names, and writes names and guards
into the source of a function. Saved programs rarely need more than operators, arithmetic and
tensors, with plain names. For everything else, the service must allow model code. torch itself
refuses pickles among the sample inputs if the environment variable of `exported` is set.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any

NATIVE = "holds native code"  # a package of AOTInductor
_PACKAGE = "data/aotinductor/"  # folder of native code
_GRAPHS = "models/"  # folder of graphs, whatever the ends of their names
# Names of functions are capitalised in sympy, and lower-case in Python. `*+`: no backtracking
_EXPRESSION = re.compile(
    r"(?:(?:Symbol|Float)\('[\w.+-]+'(?:, \w+=(?:True|False|\d+))*\)"
    r"|[A-Z][A-Za-z]*+|[a-z]++\d+|int_oo|\d++(?:\.\d+)?|[\s()*/+%,<>=&|~-])*+"
)
_GUARD = re.compile(
    r"(?:L(?:\['[\w.]+'\]|\[\d+\])++|\.(?:size|stride)\(\)\[\d+\]|\.storage_offset\(\)"
    r"|\b(?:and|or|not|max|min|math\.(?:floor|ceil|trunc|isnan|inf))\b|\d++(?:\.\d+)?"
    r"|[\s()*/+%,<>=!&|~-])*+"
)
_OPERATOR = re.compile(
    r"torch\.ops\.[a-z]\w*\.(?:(?!__)\w+|__i?(?:and|or|xor|lshift|rshift)__)\.(?!__)\w+"
    r"|torch\.ops\.higher_order\.(?!__)\w+|torch\._?sym_\w+|math\.(?!__)\w+"
    r"|_operator\.(?:eq|ne|le|ge|lt|gt|neg|pos|and_|or_|sub|mul|floordiv|mod|pow|add|truediv|getitem)"
)
_TENSOR = re.compile(r"(?:tensor|weight)_\d+")
# Without calls and quotes, or the message of an assertion that torch adds
_TEXT = re.compile(
    r"[\w.,:/<>+ -]*"
    r"|Runtime assertion failed for expression [^'\"\\\n]*+(?<= on node )'\w+'"
)
_PATH = re.compile(r"(?:\[(?:\d+|'[\w.]+')\])*")
_KINDS = {  # fields with other texts
    "expr_str": (_EXPRESSION, "holds code in the place of a size"),
    "range_constraints": (_EXPRESSION, "holds code in the place of a size"),
    "guards_code": (_GUARD, "holds code in the place of a guard"),
    "target": (_OPERATOR, "calls other functions than operators"),
    "as_operator": (_OPERATOR, "calls other functions than operators"),
    "path_name": (_TENSOR, "holds a pickle"),
}
_NESTED = ("in_spec", "out_spec", "context")  # fields with JSON as text
# Fields with remarks on nodes
_COMMENTS = (
    *("stack_trace", "nn_module_stack", "source_fn_stack"),
    *("torch_fn", "from_node", "custom"),
)


def code_in(torch: Any, path: str) -> str:
    """Return a description of code in an archive, as the predicate of a sentence, or "". Raise
    ValueError, OSError or BadZipFile for other files than archives."""
    with zipfile.ZipFile(path) as archive:
        if reason := _code_of(archive.namelist(), archive.read):
            return reason
    try:
        reader = torch._C.PyTorchFileReader(path)
    except RuntimeError:  # a file of an older torch, which torch reads by zipfile
        return ""
    # may see other members than zipfile, because a file can have two directories
    return _code_of(reader.get_all_records(), reader.get_record)


def has_plain_paths(paths: Iterable[str]) -> bool:
    """Return True if the places of sample inputs, as Python's text, have plain names."""
    return all(map(_PATH.fullmatch, paths))


def _code_of(names: list[str], read: Callable[[str], bytes]) -> str:
    if any(_PACKAGE in name for name in names):
        return NATIVE
    if len({name.lower() for name in names}) < len(names):  # torch may read another member
        raise ValueError("two members of the archive have the same name")
    for name in names:
        if name.lower().endswith(".json") or _GRAPHS in name:
            for field, value in _values(json.loads(read(name).decode())):
                if reason := _reason(field, value):
                    return reason
    return ""


def _values(document: Any) -> Iterator[tuple[str, Any]]:
    """Yield the values of a document, each with the name of its field, and the keys of the field's
    object, likewise."""
    rest = [("", document)]
    while rest:
        field, node = rest.pop()
        if isinstance(node, dict):
            yield from ((field, key) for key in node)
            rest += node.items()
        elif isinstance(node, list):
            rest += [(field, value) for value in node]
        elif field in _NESTED and isinstance(node, str):
            rest.append(("", json.loads(node)))
        elif field not in _COMMENTS:
            yield field, node


def _reason(field: str, value: Any) -> str:
    if field == "use_pickle" and value:
        return "holds a pickle"
    pattern, reason = _KINDS.get(field, (_TEXT, "has names that are not plain identifiers"))
    return reason if isinstance(value, str) and not pattern.fullmatch(value) else ""
