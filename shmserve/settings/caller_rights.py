"""Settings of clients' shared memory, and of callers' rights."""

from typing import Annotated, Literal

from shmserve.settings import kinds as kind
from shmserve.settings.request_limits import DeadlineSettings


class ClientMemorySettings(DeadlineSettings, frozen=True):
    """Client shared memory"""

    client_shm_mode: Annotated[
        Literal["map", "copy", "off"],
        "use of clients' shared memory: `map`, `copy` (safe from clients that truncate their "
        "memory) or `off`; a model's parameter `client_shm_mode` narrows the setting",
    ] = "map"
    client_shm_isolation: Annotated[
        Literal["owner", "shared"],
        "`owner`: each user has regions of its own; `shared`: all users share the names of regions",
    ] = "owner"
    client_shm_allow_remote: Annotated[
        bool, "true: remote callers count as the server's own user"
    ] = False
    client_shm_allowed_uids: Annotated[
        tuple[kind.NonNegative, ...], "ids of users who may register objects of other users"
    ] = ()
    client_shm_reap_dead_owners: Annotated[
        bool,
        "true: a region ends with the process that registered it, if that process is known",
    ] = True
    client_socket: Annotated[
        str,
        "path of the socket where local programs pass sealed memory; empty: `client.sock` in "
        "`run_dir`. Every user may connect to a path that is set here "
        "([client.md](client.md))",
    ] = ""
    max_lanes: Annotated[
        kind.NonNegative,
        "lanes, the channels of local programs to one instance "
        "([how](shared_memory.md#lanes)); one user has at most `max_caller_share` of them. 0:"
        " no lanes",
    ] = 64
    client_shm_max_regions: Annotated[kind.Positive, "largest number of regions of one user"] = 1024
    client_shm_max_total_bytes: Annotated[
        kind.Positive,
        "largest size of all regions of one user together; one region has at most 1 TiB",
    ] = 1 << 42


# Default of `allowed_hosts`: if all addresses are loopback or Unix sockets, localhost's names,
# loopback addresses and the host's own name. With any other address (or fd://), all hosts.
class AccessSettings(ClientMemorySettings, frozen=True):
    """Who may do what"""

    allowed_hosts: Annotated[
        tuple[str, ...],
        "hosts, without port, that `Host` of a request or `:authority` of a call may name; "
        "`*`: any. Empty: names of localhost if all addresses are loopback or Unix sockets, "
        "else any host ([security.md](security.md))",
    ] = ()
    allowed_origins: Annotated[
        tuple[kind.Origin, ...],
        "origins, such as `https://tool.example`, whose web pages may do the same as programs",
    ] = ()
    state_changes_from: Annotated[
        kind.From,
        "callers who may load and unload models by name, set logs and traces, and set GRPS "
        "online and offline: `owner` (the server's user and root), `local` (any user of the "
        "host) or `anyone`",
    ] = "anyone"
    model_files_from: Annotated[
        kind.From,
        "callers who may load a configuration or files that come with the request, which are "
        "code that runs as the server's user: `owner`, `local` or `anyone`",
    ] = "owner"
    remote_binds: Annotated[
        tuple[str, ...],
        "addresses of `http_bind`, `grpc_bind` and `metrics_bind` that a proxy uses: callers "
        "there are remote, also if the proxy adds no `Forwarded`, `Via` or `X-Forwarded-For`",
    ] = ()
    keys_file: Annotated[
        str,
        "TOML file with at most 1024 hashed keys and the scopes of each key; `shmserve key "
        "new` adds to it ([keys.md](keys.md#keys))",
    ] = ""
    keys_required_from: Annotated[
        kind.KeysFrom,
        "callers who need a key for all but health, with `keys_file`: `remote` callers; "
        "`local`: also other users of the host; `anyone`: also the server's user and root; "
        "`nobody`: keys only allow more",
    ] = "remote"
    shared_sequences: Annotated[
        bool,
        "all callers share one namespace of sequence ids, as with Triton; else ids belong to "
        "the holder of a key or to the user on this host, and all remote callers without a key "
        "share one namespace ([sequences](model_config.md#sequences))",
    ] = False
    http_restricted_api: Annotated[
        tuple[str, ...],
        "`<category>[,<category>]:<header>=<secret>`, in the environment separated by `;`: "
        "only requests with that header may use these APIs ([security.md](security.md))",
    ] = ()
    grpc_restricted_protocol: Annotated[
        tuple[str, ...],
        "`<category>[,<category>]:<key>=<secret>`, in the environment separated by `;`: only "
        "calls with that metadata may use these protocols",
    ] = ()
    http_header_forward_pattern: Annotated[
        str,
        "regular expression: matching request headers become parameters of inference "
        "requests; with `(?-i)` in front case matters "
        "([http_api.md](http_api.md#restricted-apis-and-forwarded-headers))",
    ] = ""
    grpc_header_forward_pattern: Annotated[
        str, "regular expression: matching metadata become parameters of inference requests"
    ] = ""
