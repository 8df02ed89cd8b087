"""Suggestions for misspelt fields and values of config.pbtxt, from texts of protobuf's parsers."""

import difflib
import re

from shmserve._generated import model_config_pb2 as pb

_FIELD = re.compile(r'Message type "([\w.]+)" has no field named "(\w+)"')
_VALUE = re.compile(
    r'Enum type "(?P<type>[\w.]+)" has no value named (?P<name>\w+)'
    r"|Invalid enum value (?P<value>\w+) for enum type (?P<of>[\w.]+?) at"
)
_LISTED = re.compile(r"\s*Available Fields.*", re.DOTALL)  # by names of JSON, in full
_LIKENESS = 0.7
_OF_REQUESTS = {"BYTES": "STRING", "TYPE_BYTES": "STRING"}  # named otherwise in requests


def completed(problem: str) -> str:
    """Return a parser's text in one line, with the nearest existing name, if a near name exists."""
    text = " ".join(_LISTED.sub("", problem).split())[:500].rstrip(".")
    pool = pb.DESCRIPTOR.pool
    wrong, names = "", list[str]()
    if match := _FIELD.search(problem):
        wrong, names = match[2], list(pool.FindMessageTypeByName(match[1]).fields_by_name)
    elif match := _VALUE.search(problem):
        wrong = match["name"] or match["value"]
        kind = pool.FindEnumTypeByName(match["type"] or match["of"])
        names = list(kind.values_by_name)
    ends = f"_{_OF_REQUESTS.get(wrong, wrong)}".upper()  # FP32 for TYPE_FP32, cpu for KIND_CPU
    near = [name for name in names if name.endswith(ends)]
    near = near or difflib.get_close_matches(wrong, names, 1, _LIKENESS)
    return f"{text}; did you mean {near[0]}?" if near else text
