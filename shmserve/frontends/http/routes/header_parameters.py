"""Header fields that become parameters of the inference request."""

from __future__ import annotations

import re
from typing import Any

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


def compiled(pattern: str) -> re.Pattern[str] | None:
    """The setting `http_header_forward_pattern`; None: nothing is forwarded."""
    return re.compile(pattern, re.IGNORECASE) if pattern else None


def forwarded(pattern: re.Pattern[str], environ: dict[str, Any]) -> dict[str, str]:
    """The header fields that match, by lower-case name.

    Raises:
        InvalidArgument: one of them would become a parameter that is reserved.
    """
    fields: dict[str, str] = {}
    for key, value in environ.items():
        if not key.startswith("HTTP_"):
            continue
        name = key[len("HTTP_") :].replace("_", "-").lower()
        if pattern.search(name) is None:
            continue
        parameter = name.replace("-", "_")
        if parameter in _FIXED or parameter.startswith(RESERVED_PREFIX):
            raise InvalidArgument(
                f"header '{name}' cannot be forwarded: parameter '{parameter}' is reserved for"
                " Triton usage"
            )
        fields[name] = value
    return fields
