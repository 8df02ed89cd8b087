"""Settings of clients' shared memory, and of callers' rights."""

from __future__ import annotations

from typing import Annotated, Literal

from shmserve.settings.field_kinds import From, KeysFrom, NonNegative, Origin, Positive
from shmserve.settings.request_limits import DeadlineSettings


class ClientMemorySettings(DeadlineSettings, frozen=True):
    """Client shared memory"""

    client_shm_mode: Annotated[
        Literal["map", "copy", "off"],
        "clients' shared memory: `map`, `copy` (immune to clients that truncate it) or `off`; a "
        "model's parameter `client_shm_mode` narrows it",
    ] = "map"
    client_shm_isolation: Annotated[
        Literal["owner", "shared"],
        "`owner`: each user has names of regions of its own; `shared`: one namespace of regions "
        "for all users",
    ] = "owner"
    client_shm_allow_remote: Annotated[bool, "remote callers count as the server's own user"] = (
        False
    )
    client_shm_allowed_uids: Annotated[
        tuple[NonNegative, ...], "users who may register objects that belong to other users"
    ] = ()
    client_shm_reap_dead_owners: Annotated[
        bool, "drop regions with the process that registered them, where it is known"
    ] = True
    client_socket: Annotated[
        str,
        "where local programs pass sealed memory; empty: `client.sock` in `run_dir`; a path set "
        "here is open to every user ([client.md](client.md))",
    ] = ""
    max_lanes: Annotated[
        NonNegative,
        "local programs' own channels to one instance ([how](shared_memory.md#lanes)), of which "
        "one user has `max_caller_share` at most; 0: no lanes",
    ] = 64
    client_shm_max_regions: Annotated[Positive, "regions of one user"] = 1024
    client_shm_max_total_bytes: Annotated[
        Positive, "bytes of all regions of one user; one region has 1 TiB at most"
    ] = 1 << 42


# Default of `allowed_hosts`: if all addresses are loopback or Unix sockets, localhost's names,
# loopback addresses and the host's own name. With any other address (or fd://), all hosts.
class AccessSettings(ClientMemorySettings, frozen=True):
    """Who may do what"""

    allowed_hosts: Annotated[
        tuple[str, ...],
        "hosts (without port; `*`: any) that requests may name in `Host`, and calls in "
        "`:authority`; empty: localhost's names where only loopback and Unix sockets are bound, "
        "else any ([security.md](security.md))",
    ] = ()
    allowed_origins: Annotated[
        tuple[Origin, ...],
        "origins, such as `https://tool.example`, whose pages may do what programs may",
    ] = ()
    state_changes_from: Annotated[
        From,
        "who may load and unload models by name, set logs and traces, take GRPS on- and offline: "
        "`owner` (the server's user and root), `local` (any user of the host) or `anyone`",
    ] = "anyone"
    model_files_from: Annotated[
        From,
        "who may load a configuration or files that come with the request, which are code that "
        "runs as the server's user: `owner`, `local` or `anyone`",
    ] = "owner"
    remote_binds: Annotated[
        tuple[str, ...],
        "addresses of `http_bind`, `grpc_bind` and `metrics_bind` behind which a proxy is: "
        "callers there are remote, also if the proxy adds no `Forwarded`, `Via` or "
        "`X-Forwarded-For`",
    ] = ()
    keys_file: Annotated[
        str,
        "TOML file of hashed keys, 1024 at most, and what each of them allows; `shmserve key new` "
        "adds to it ([keys.md](keys.md#keys))",
    ] = ""
    keys_required_from: Annotated[
        KeysFrom,
        "with `keys_file`, who needs a key for all but health: `remote` callers, `local`: also "
        "other users of the host, `anyone`: also the server's user and root; `nobody`: keys only "
        "allow more",
    ] = "remote"
    http_restricted_api: Annotated[
        tuple[str, ...],
        "`<category>[,<category>]:<header>=<secret>`, in the environment separated by `;`: only "
        "requests with that header may use these APIs ([security.md](security.md))",
    ] = ()
    grpc_restricted_protocol: Annotated[
        tuple[str, ...],
        "`<category>[,<category>]:<key>=<secret>`, in the environment separated by `;`: only "
        "calls with that metadata may use these protocols",
    ] = ()
    http_header_forward_pattern: Annotated[
        str,
        "regular expression: matching request headers become parameters of inference requests; "
        "`(?-i)…`: case counts ([http_api.md](http_api.md#restricted-apis-and-forwarded-headers))",
    ] = ""
    grpc_header_forward_pattern: Annotated[
        str, "regular expression: matching metadata become parameters of inference requests"
    ] = ""
