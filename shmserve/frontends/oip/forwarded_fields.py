"""Header fields and metadata that become request parameters under their own names.

The settings are `http_header_forward_pattern` and `grpc_header_forward_pattern`.
"""

import re
from collections.abc import Iterable

from shmserve.errors import InvalidArgument
from shmserve.protocol.oip.request import RESERVED_PREFIX

# Parameters with a meaning fixed by the protocol, and a name reserved by Triton
_PROTOCOL_PARAMETERS = {
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "priority",
    "timeout",
    "binary_data_output",
    "headers",
}
_CASE_SENSITIVE = "(?-i)"  # RE2's prefix of case-sensitive patterns


def compiled(pattern: str) -> re.Pattern[str] | None:
    """Return the compiled pattern of one of the settings; None if the setting is empty and nothing
    is forwarded. Raise re.error if the setting is no regular expression."""
    if not pattern:
        return None
    flags = re.NOFLAG if pattern.startswith(_CASE_SENSITIVE) else re.IGNORECASE
    return re.compile(pattern.removeprefix(_CASE_SENSITIVE), flags)


def forwarded(pattern: re.Pattern[str], fields: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the fields whose names match the pattern. Values of a repeated field are joined by
    commas. `pattern`: searched in each name. `fields`: names in lower case, and values. Raise
    InvalidArgument if a matching field would become a reserved parameter."""
    kept: dict[str, str] = {}
    for name, value in fields:
        if pattern.search(name) is None:
            continue
        parameter = name.replace("-", "_")
        if parameter in _PROTOCOL_PARAMETERS or parameter.startswith(RESERVED_PREFIX):
            raise InvalidArgument(
                f"header '{name}' cannot be forwarded: parameter '{parameter}' is reserved for"
                " Triton usage"
            )
        kept[name] = f"{kept[name]},{value}" if name in kept else value
    return kept
