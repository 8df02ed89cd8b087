"""Header fields and metadata that become parameters of requests, under their own names.

The settings are `http_header_forward_pattern` and `grpc_header_forward_pattern`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from shmserve.errors import InvalidArgument
from shmserve.protocol.oip.request import RESERVED_PREFIX

# Parameters whose meaning the protocol fixes
_FIXED = {
    "sequence_id",
    "sequence_start",
    "sequence_end",
    "priority",
    "timeout",
    "binary_data_output",
}
_AS_WRITTEN = "(?-i)"  # at the start: letters' case counts, as RE2 has it


def compiled(pattern: str) -> re.Pattern[str] | None:
    """What one of the settings means; None: nothing is forwarded.

    Raises:
        re.error: it is no regular expression.
    """
    if not pattern:
        return None
    flags = re.NOFLAG if pattern.startswith(_AS_WRITTEN) else re.IGNORECASE
    return re.compile(pattern.removeprefix(_AS_WRITTEN), flags)


def forwarded(pattern: re.Pattern[str], fields: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Of fields by lower-case name those that match; what comes more than once is joined.

    Raises:
        InvalidArgument: one of them would become a parameter that is reserved.
    """
    kept: dict[str, str] = {}
    for name, value in fields:
        if pattern.search(name) is None:
            continue
        parameter = name.replace("-", "_")
        if parameter in _FIXED or parameter.startswith(RESERVED_PREFIX):
            raise InvalidArgument(
                f"header '{name}' cannot be forwarded: parameter '{parameter}' is reserved for"
                " Triton usage"
            )
        kept[name] = f"{kept[name]},{value}" if name in kept else value
    return kept
