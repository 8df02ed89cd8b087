"""Kinds of settings, and the text beside each field.

A field is `name: Annotated[kind, "what the setting does"] = default`. docs/settings.md and
`shmserve settings NAME` show this text, which is Markdown with links relative to docs/.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

Positive = Annotated[int, Meta(ge=1)]
NonNegative = Annotated[int, Meta(ge=0)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
SecondsOrNone = Annotated[float, Meta(ge=0)]  # 0 switches a feature off
Share = Annotated[float, Meta(gt=0, le=1)]
Origin = Annotated[str, Meta(pattern="^[a-z][a-z0-9+.-]*://[^/ ]+$")]  # https://host[:port]
HostRule = Annotated[
    str, Meta(pattern=r"^(cpu-cores=[0-9]{1,4}(-[0-9]{1,4})?|numa-node=[0-9]{1,3})$")
]
ResourceAmount = Annotated[str, Meta(pattern="^[^:]+:[1-9][0-9]{0,8}(:(cpu|[0-9]{1,4}))?$")]
Url = Annotated[str, Meta(pattern=r"^https?://[^/@?#\s]+(/[^@?#\s]*)?$")]  # without secrets
Pair = Annotated[str, Meta(pattern="^[^=]+=.*$")]  # name=value
HeaderPair = Annotated[str, Meta(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+=[\x20-\x7e]*$")]  # RFC 9110
# A folder, NAME=FOLDER, or a store's address without secrets, which belong in the environment.
RepositoryPath = Annotated[
    str,
    Meta(
        pattern=r"^(?!([^/]*=)?[A-Za-z][A-Za-z0-9+.-]*://)|^(s3|gs|az|hf|https?)://[^/@?#\s]+(/[^?#\s]*)?$"
    ),
]
TcpAddress = Annotated[str, Meta(pattern=r"^(\[[0-9A-Fa-f:.]+\]|[^][:/]+):[1-9][0-9]{0,4}$")]
FileMode = Annotated[str, Meta(pattern="^[0-7]{3,4}$")]
Names = Annotated[tuple[str, ...], Meta(min_length=1)]
# the server's user and root; any user of the host; all callers
From = Literal["owner", "local", "anyone"]
# each value includes the callers of the value before
KeysFrom = Literal["nobody", "remote", "local", "anyone"]
KIB = 1 << 10
MIB = 1 << 20
