"""Who may do what: kinds of callers, what they may do, and the table between them.

Pure policy: doors say who calls (`core.caller.Caller`, as the kernel tells, with the
scopes of the key that came along) and what for. docs/security.md has the table for people.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from shmserve.config import Settings
from shmserve.core.caller import Caller
from shmserve.errors import PermissionDenied, ShmserveError, Unauthenticated
from shmserve.settings.field_kinds import From, KeysFrom

# owner: the server's user, and root; local: another user of this host; browser: a page of
# another origin, whoever's browser it is open in.
Kind = Literal["owner", "local", "remote", "browser"]
# use: run models, and read; register: pass memory to the server; change: load and unload what
# the repository has, logs, traces, GRPS's online flag; send models: load what the client sends.
Action = Literal["use", "register", "change", "send models"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ACTIONS: tuple[Action, ...] = get_args(Action)

_WITHIN: Mapping[From, tuple[Kind, ...]] = {
    "owner": ("owner",),
    "local": ("owner", "local"),
    "anyone": ("owner", "local", "remote"),
}
# From whom keys are required: from those, and from whoever is further away.
_BEYOND: Mapping[KeysFrom, tuple[Kind, ...]] = {
    "nobody": (),
    "remote": ("remote",),
    "local": ("local", "remote"),
    "anyone": ("owner", "local", "remote"),
}
_SETTING: Mapping[Action, str] = {
    "register": "client_shm_allow_remote",
    "change": "state_changes_from",
    "send models": "model_files_from",
}
_WHO: Mapping[Kind, str] = {
    "owner": "the server's own user on its host",
    "local": "other users of its host",
}
_WHAT: Mapping[Action, str] = {
    "use": "using the service",
    "register": "registering memory",
    "change": "changing the server's state",
    "send models": "loading a configuration or files that come with the request",
}


def table(settings: Settings) -> dict[Action, tuple[Kind, ...]]:
    """Who may do what without a key, under these settings."""
    rows = {
        "use": _WITHIN["anyone"],
        "register": _WITHIN["anyone" if settings.client_shm_allow_remote else "local"],
        "change": _WITHIN[settings.state_changes_from],
        "send models": _WITHIN[settings.model_files_from],
    }
    keyed = _BEYOND[settings.keys_required_from] if settings.keys_file else ()
    return {action: tuple(kind for kind in rows[action] if kind not in keyed) for action in ACTIONS}


class Access:
    """The table, applied.

    Args:
        settings: they name what differs from the defaults.
        server_uid: the user the server runs as.
    """

    def __init__(self, settings: Settings, server_uid: int) -> None:
        self._table = table(settings)
        self._keys = bool(settings.keys_file)
        self._owners = (server_uid, 0)

    def kind(self, caller: Caller) -> Kind:
        """What kind of caller it is; `browser` is told by `Origins`, from the request."""
        if caller.remote:
            return "remote"
        return "owner" if caller.uid in self._owners else "local"

    def open_to_all(self, action: Action) -> bool:
        """Whether who calls makes no difference."""
        return self._table[action] == _WITHIN["anyone"]

    def asked_at_the_door(self, action: Action) -> bool:
        """Whether a door has to `check` this. Who registers what is otherwise for the region book
        to say."""
        return not self.open_to_all(action) and (self._keys or action != "register")

    def check(self, action: Action, caller: Caller) -> None:
        """Let it be done, or not.

        Args:
            action: what is to be done.
            caller: who asks, with the scopes of the key that came along, if one did.

        Raises:
            Unauthenticated: not without a key.
            PermissionDenied: this caller may not, nor may whoever has this key.
        """
        if action in caller.scopes or self.kind(caller) in self._table[action]:
            return
        raise self._refusal(action, bool(caller.scopes))

    def sees_errors(self, caller: Caller) -> bool:
        """Whether what clients were told of errors is for this caller, too: the server's own user
        may read the log anyway, and holders of a key that may change the server operate it."""
        return self.kind(caller) == "owner" or "change" in caller.scopes

    def _refusal(self, action: Action, has_key: bool) -> ShmserveError:
        who = [_WHO[kind] for kind in self._table[action]]
        if not self._keys:
            whose = f"{' and '.join(who)} (setting {_SETTING[action]})"
            return PermissionDenied(f"{_WHAT[action]} is for {whose}")
        whose = " and ".join([*who, f"holders of a key with the scope '{action}'"])
        kind = PermissionDenied if has_key else Unauthenticated
        return kind(f"{_WHAT[action]} is for {whose}")
