"""Access: kinds of callers, actions, and the table of actions allowed to each kind.

Pure policy. A door names the caller (`core.caller.Caller`, from the kernel, with the scopes of the
key sent along) and the action. docs/security.md shows the table to users.
"""

from collections.abc import Mapping
from typing import Literal, get_args

from shmserve.config import Settings
from shmserve.core.caller import Caller
from shmserve.errors import PermissionDenied, ShmserveError, Unauthenticated
from shmserve.settings.kinds import From, KeysFrom

# owner: the server's user, and root; local: another user of this host; browser: a page of another
# origin, in any user's browser.
Kind = Literal["owner", "local", "remote", "browser"]
# use: run models, and read; register: pass memory to the server; change: load and unload models of
# the repository, logs, traces, GRPS's online flag; send models: load a configuration or files sent
# by the client.
Action = Literal["use", "register", "change", "send models"]
KINDS: tuple[Kind, ...] = get_args(Kind)
ACTIONS: tuple[Action, ...] = get_args(Action)

_WITHIN: Mapping[From, tuple[Kind, ...]] = {
    "owner": ("owner",),
    "local": ("owner", "local"),
    "anyone": ("owner", "local", "remote"),
}
# Kinds of callers that need a key: the setting's kind, and kinds further away.
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
# Categories of APIs that the client socket has. Lanes check "inference" by themselves.
_HERE = ("shared-memory", "metadata")
_HOW = "send a key as 'Authorization: Bearer KEY', or as 'shmserve-key: KEY'"
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
    """Return action -> kinds of callers allowed without a key, under these settings."""
    rows = {
        "use": _WITHIN["anyone"],
        "register": _WITHIN["anyone" if settings.client_shm_allow_remote else "local"],
        "change": _WITHIN[settings.state_changes_from],
        "send models": _WITHIN[settings.model_files_from],
    }
    keyed = _BEYOND[settings.keys_required_from] if settings.keys_file else ()
    return {action: tuple(kind for kind in rows[action] if kind not in keyed) for action in ACTIONS}


def is_restricted(settings: Settings, category: str) -> bool:
    """Return True if HTTP or gRPC asks for a secret for a category of APIs. Ways to these APIs on
    which no secret can be sent are closed then."""
    rules = (*settings.http_restricted_api, *settings.grpc_restricted_protocol)
    return any(category in map(str.strip, rule.partition(":")[0].split(",")) for rule in rules)


class Access:
    """Access checks by the table. `settings`: settings with the access rules. `server_uid`: user of
    the server."""

    def __init__(self, settings: Settings, server_uid: int) -> None:
        self._table = table(settings)
        self._keys = bool(settings.keys_file)
        self._restricted = {name for name in _HERE if is_restricted(settings, name)}
        self._owners = (server_uid, 0)

    def kind(self, caller: Caller) -> Kind:
        """Return the kind of a caller. `Origins` detects the kind `browser`, from the request."""
        if caller.remote:
            return "remote"
        return "owner" if caller.uid in self._owners else "local"

    def open_to_all(self, action: Action) -> bool:
        """Return True if owner, local and remote callers may all do the action without a key."""
        return self._table[action] == _WITHIN["anyone"]

    def asked_at_the_door(self, action: Action) -> bool:
        """Return True if a door must `check` the action. Without keys, the region book checks
        registrations."""
        return not self.open_to_all(action) and (self._keys or action != "register")

    def check(self, action: Action, caller: Caller) -> None:
        """Check that a caller may do an action.

        Args:
            action: requested action.
            caller: sender, with the scopes of the key sent along, if any.

        Raises:
            Unauthenticated: the action needs a key.
            PermissionDenied: neither the caller nor the key allows the action.
        """
        if action in caller.scopes or self.kind(caller) in self._table[action]:
            return
        raise self._refusal(action, caller)

    def check_client_socket(self, action: Action, caller: Caller, category: str) -> None:
        """Check that a caller may do an action over the client socket, where no request carries a
        key or a secret. `category`: the action's category of APIs. Raises as `check`."""
        if category in self._restricted:
            text = f"{category} is a restricted API, which the client socket does not have"
            raise PermissionDenied(text)
        if self.asked_at_the_door(action):
            try:
                self.check(action, caller)
            except Unauthenticated:
                text = f"{_WHAT[action]} needs a key, and the client socket takes no keys"
                raise Unauthenticated(text) from None

    def sees_errors(self, caller: Caller) -> bool:
        """Return True if the caller may see error texts sent to other clients. The server's own
        user may read the log anyway, and holders of a key with scope "change" operate the
        server."""
        return self.kind(caller) == "owner" or "change" in caller.scopes

    def _refusal(self, action: Action, caller: Caller) -> ShmserveError:
        allowed = [_WHO[kind] for kind in self._table[action]]
        if not self._keys:
            holders = f"{' and '.join(allowed)} (setting {_SETTING[action]})"
            return PermissionDenied(f"{_WHAT[action]} is for {holders}")
        holders = " and ".join([*allowed, f"holders of a key with the scope '{action}'"])
        if caller.scopes:
            return PermissionDenied(f"{_WHAT[action]} is for {holders}")
        why = "the key sent is unknown or expired" if caller.key_refused else "no key was sent"
        return Unauthenticated(f"{_WHAT[action]} is for {holders}; {why}: {_HOW}")
