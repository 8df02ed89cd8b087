"""cluster.toml: the models served on the nodes of a Ray cluster, and the balancers.

Table names are prefixes of setting names, as in the server's settings file: errors call
``[models.digits] memory_bytes`` ``models_digits_memory_bytes``. Sizes and times may have units.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from shmserve.cluster.policies.cluster_plan import ModelRule
from shmserve.cluster.policies.replica_scaling import ScalingRule
from shmserve.errors import ConfigError
from shmserve.setting_sources import Declared, Sources, toml_file
from shmserve.settings import kinds

Port = Annotated[int, Meta(ge=0, le=65535)]
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0, le=1e9)]
Bind = Annotated[str, kinds.described("an address HOST:PORT or :PORT", r"^[^ ]*:[1-9][0-9]{0,4}$")]
Place = Annotated[
    str,
    kinds.described("an absolute path or HOST:PORT", r"^(/[^ ]+|[^ /]+:[1-9][0-9]{0,4})$"),
]
ModelName = Annotated[
    str, kinds.described("a name of letters, digits, _, . and -", r"^[A-Za-z0-9_.-]+$")
]


class ClusterSettings(Struct, frozen=True):
    """Settings of the file except for models. Sizes are bytes, times are seconds."""

    # of the cluster; a Ray may have several clusters, on different nodes
    name: ModelName = "shmserve"
    ray_address: str = "auto"
    interval_s: Seconds = 1.0  # between two rounds of the controller
    node_timeout_s: Seconds = 10.0  # silence after which a node counts as gone
    drain_s: Seconds = 2.0  # from a replica's last routed request to its unloading
    start_timeout_s: Seconds = 300.0  # limit for `up` to get a replica of each model
    # Service of each node
    service_model_repository: tuple[str, ...] = ()
    service_config: str = ""  # path of a settings file on each node
    service_run_dir: str = ""  # parent folder of the services' run directories
    service_http_port: Port = 8000  # 0: any free port
    service_grpc_port: Port = 8001
    service_http_workers: Positive = 2
    service_load_timeout_s: Seconds = 300.0  # to load a model
    service_stop_timeout_s: Seconds = 60.0  # after which the service is killed
    # Nodes that run a service
    nodes_resource: str = ""  # only nodes with this Ray resource
    nodes_room_bytes: Annotated[int, Meta(ge=0)] = 0  # memory for models; 0: as the node reports
    # Balancers
    haproxy_sockets: tuple[Place, ...] = ()  # paths, or HOST:PORT
    haproxy_http_bind: Bind = ":8080"
    haproxy_grpc_bind: Bind = ":8081"
    haproxy_slots: Annotated[int, Meta(ge=1, le=4096)] = 32  # limit of servers for a model
    haproxy_check_s: Seconds = 1.0  # between two health checks of a server


class ModelTable(Struct, frozen=True):
    """Settings of a model."""

    # memory of a replica on each GPU of a node, or in the host memory of a node without GPUs
    memory_bytes: Positive
    replicas: Positive = 1  # minimum
    max_replicas: Positive = 1
    queue_s: Seconds = 0.05  # longest mean wait of requests for an executor
    up_s: Seconds = 3.0  # time of longer waits before replicas are added
    down_s: Seconds = 60.0  # time of hardly any waits before replicas are removed

    def rule(self) -> ModelRule:
        scaling = ScalingRule(
            self.replicas,
            max(self.replicas, self.max_replicas),
            self.queue_s,
            self.up_s,
            self.down_s,
        )
        return ModelRule(self.memory_bytes, scaling)


class ClusterFile(Struct, frozen=True):
    """Contents of a cluster file; models by name."""

    settings: ClusterSettings
    models: dict[str, ModelTable]

    def rules(self) -> dict[str, ModelRule]:
        return {name: table.rule() for name, table in self.models.items()}


def read(path: str) -> ClusterFile:
    """Read a cluster file. Raise ConfigError if the file cannot be read or has errors; the message
    has a line for each error."""
    names = _model_names(path)
    declared = _declared("", ClusterSettings)
    for name in names:
        of_model = _declared(f"models_{name}_", ModelTable)
        if both := declared.keys() & of_model.keys():
            raise ConfigError(
                f"models: {min(both)} in {path} could belong to {name} or to another model"
            )
        declared |= of_model
    source = Sources(declared, {}, {})
    source.take_file(path, "the command")
    values = source.converted()
    problems = source.problems + _wrong_names(names)
    for name in names:
        if f"models_{name}_memory_bytes" not in source.given:
            wants = declared[f"models_{name}_memory_bytes"].wants
            problems.append(f"models_{name}_memory_bytes is missing in {path}: it wants {wants}")
    if not problems:
        file = ClusterFile(
            ClusterSettings(**_under("", ClusterSettings, values)),
            {name: ModelTable(**_under(f"models_{name}_", ModelTable, values)) for name in names},
        )
        problems = _contradictions(file, path)
    if problems:
        raise ConfigError("\n".join(problems))
    return file


def _model_names(path: str) -> list[str]:
    """Return the names of the tables below `models`. `read` reports an unreadable file."""
    try:
        models = toml_file(path, "the command")[1].get("models")
    except ConfigError:
        return []
    if not isinstance(models, dict):
        return []
    return [name for name, table in models.items() if isinstance(table, dict)]


def _declared(prefix: str, kind: type[Struct]) -> dict[str, Declared]:
    declared = {}
    for field in msgspec.structs.fields(kind):
        default = "" if field.default is msgspec.NODEFAULT else field.default
        declared[prefix + field.name] = Declared(prefix + field.name, field.type, default)
    return declared


def _under(prefix: str, kind: type[Struct], values: dict[str, Any]) -> dict[str, Any]:
    fields = kind.__struct_fields__
    return {field: values[prefix + field] for field in fields if prefix + field in values}


def _wrong_names(names: list[str]) -> list[str]:
    wrong = []
    for name in names:
        try:
            msgspec.convert(name, ModelName)
        except msgspec.ValidationError:
            wrong.append(f"models: {name!r} is no name: letters, digits, '_', '.' and '-'")
    return wrong


def _contradictions(file: ClusterFile, path: str) -> list[str]:
    wrong = []
    if not file.models:
        wrong.append(
            f"models: there are none in {path}, which wants a table [models.NAME] for each"
        )
    if not file.settings.service_model_repository:
        wrong.append(f"service_model_repository is missing in {path}: it wants folders")
    for name, table in file.models.items():
        max_replicas = table.rule().scaling.most
        if 1 < table.max_replicas < table.replicas:
            wrong.append(
                f"models_{name}_max_replicas = {table.max_replicas}: "
                f"is less than models_{name}_replicas, {table.replicas}"
            )
        if file.settings.haproxy_sockets and max_replicas > file.settings.haproxy_slots:
            wrong.append(
                f"haproxy_slots = {file.settings.haproxy_slots}: "
                f"is less than the {max_replicas} replicas that {name} may have"
            )
    return wrong
