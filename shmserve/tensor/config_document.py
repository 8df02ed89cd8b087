"""A model's configuration as clients see it: the body of ``GET /v2/models/{m}/config``, typed.

The Structs have the names of Triton's ModelConfig in its order, enums as names and int64 as
numbers. So the JSON form of a Struct is the document itself. UNSET fields are not shown. Fields
that shmserve never reads stay plain JSON (`JsonObject`, `JsonArray`).
"""

from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType, field

JsonObject = dict[str, Any]
JsonArray = tuple[Any, ...]


class ReshapeEntry(Struct, frozen=True):
    """Shape of a tensor inside the model, without the batch dimension."""

    shape: tuple[int, ...] = ()


class InputEntry(Struct, frozen=True):
    """An input. `data_type` TYPE_INVALID or empty `dims`: the model itself supplies the value."""

    name: str
    data_type: str = "TYPE_INVALID"
    format: str = "FORMAT_NONE"
    dims: tuple[int, ...] = ()
    reshape: ReshapeEntry | UnsetType = UNSET
    is_shape_tensor: bool = False
    allow_ragged_batch: bool = False
    optional: bool = False
    is_non_linear_format_io: bool = False


class OutputEntry(Struct, frozen=True):
    name: str
    data_type: str = "TYPE_INVALID"
    dims: tuple[int, ...] = ()
    reshape: ReshapeEntry | UnsetType = UNSET
    label_filename: str = ""
    is_shape_tensor: bool = False
    is_non_linear_format_io: bool = False


class BatchInputEntry(Struct, frozen=True):
    """Information about a batch for the model. `target_name`: inputs that no client sends."""

    kind: str = "BATCH_ELEMENT_COUNT"
    target_name: tuple[str, ...] = ()
    data_type: str = "TYPE_INVALID"
    source_input: tuple[str, ...] = ()


class BatchOutputEntry(Struct, frozen=True):
    """Split of a batch's outputs: each request's output has the shape of its `source_input`."""

    target_name: tuple[str, ...] = ()
    kind: str = "BATCH_SCATTER_WITH_INPUT_SHAPE"
    source_input: tuple[str, ...] = ()


class GraphEntry(Struct, frozen=True):
    level: int = 0


class OptimizationEntry(Struct, frozen=True):
    graph: GraphEntry | UnsetType = UNSET
    priority: str | UnsetType = UNSET
    cuda: JsonObject | UnsetType = UNSET
    execution_accelerators: JsonObject | UnsetType = UNSET
    input_pinned_memory: JsonObject | UnsetType = UNSET
    output_pinned_memory: JsonObject | UnsetType = UNSET
    gather_kernel_buffer_threshold: int | UnsetType = UNSET
    eager_batching: bool | UnsetType = UNSET


class QueuePolicyEntry(Struct, frozen=True):
    """Waiting of requests for a batch. `timeout_action` is REJECT or DELAY."""

    timeout_action: str = "REJECT"
    default_timeout_microseconds: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


class BatchingEntry(Struct, frozen=True):
    """`dynamic_batching`."""

    preferred_batch_size: tuple[int, ...] | UnsetType = UNSET
    max_queue_delay_microseconds: int | UnsetType = UNSET
    preserve_ordering: bool | UnsetType = UNSET
    priority_levels: int | UnsetType = UNSET
    default_priority_level: int | UnsetType = UNSET
    default_queue_policy: QueuePolicyEntry | UnsetType = UNSET
    priority_queue_policy: dict[str, QueuePolicyEntry] | UnsetType = UNSET


class ControlEntry(Struct, frozen=True):
    """Meaning of a control input. `kind` is CONTROL_SEQUENCE_START, _READY, _END or _CORRID.

    For the first three kinds, one pair gives the values for false and true. For _CORRID,
    `data_type` gives the type of the id.
    """

    kind: str = "CONTROL_SEQUENCE_START"
    int32_false_true: tuple[int, ...] = ()
    fp32_false_true: tuple[float, ...] = ()
    bool_false_true: tuple[bool, ...] = ()
    data_type: str = "TYPE_INVALID"


class ControlInputEntry(Struct, frozen=True):
    name: str
    control: tuple[ControlEntry, ...] = ()


class InitialStateEntry(Struct, frozen=True):
    """State at the start of a sequence. `data_file` lies in the model's folder `initial_state`."""

    data_type: str = "TYPE_INVALID"
    dims: tuple[int, ...] = ()
    zero_data: bool | UnsetType = UNSET
    data_file: str | UnsetType = UNSET
    name: str = ""


class StateEntry(Struct, frozen=True):
    """State of a sequence: an output of one run that becomes an input of the next run."""

    input_name: str
    output_name: str
    data_type: str
    dims: tuple[int, ...] = ()
    initial_state: tuple[InitialStateEntry, ...] = ()
    use_same_buffer_for_input_output: bool = False
    use_growable_memory: bool = False


class DirectEntry(Struct, frozen=True):
    max_queue_delay_microseconds: int = 0
    minimum_slot_utilization: float = 0.0


class OldestEntry(Struct, frozen=True):
    max_candidate_sequences: int = 0
    preferred_batch_size: tuple[int, ...] = ()
    max_queue_delay_microseconds: int = 0
    preserve_ordering: bool = False


class SequenceEntry(Struct, frozen=True):
    """`sequence_batching`."""

    direct: DirectEntry | UnsetType = UNSET
    oldest: OldestEntry | UnsetType = UNSET
    max_sequence_idle_microseconds: int = 0
    control_input: tuple[ControlInputEntry, ...] = ()
    state: tuple[StateEntry, ...] = ()
    iterative_sequence: bool = False


class ResourceEntry(Struct, frozen=True):
    """Amount of a resource. `is_global`: one resource for all devices, not one per device."""

    name: str = ""
    is_global: bool = field(default=False, name="global")
    count: int = 0


class RateLimiterEntry(Struct, frozen=True):
    """`instance_group.rate_limiter`."""

    resources: tuple[ResourceEntry, ...] = ()
    priority: int = 0


class GroupEntry(Struct, frozen=True):
    """An `instance_group`. Once placed, `kind` and `gpus` show the devices of the instances."""

    name: str
    kind: str
    count: int
    rate_limiter: RateLimiterEntry | UnsetType = UNSET
    gpus: tuple[int, ...] = ()
    secondary_devices: JsonArray = ()
    profile: tuple[str, ...] = ()
    passive: bool = False
    host_policy: str = ""


class TransactionEntry(Struct, frozen=True):
    decoupled: bool = False


class ConfigDocument(Struct, frozen=True):
    name: str = ""
    platform: str | UnsetType = UNSET
    backend: str | UnsetType = UNSET
    runtime: str | UnsetType = UNSET
    version_policy: JsonObject | UnsetType = UNSET
    max_batch_size: int = 0
    input: tuple[InputEntry, ...] = ()
    output: tuple[OutputEntry, ...] = ()
    batch_input: tuple[BatchInputEntry, ...] = ()
    batch_output: tuple[BatchOutputEntry, ...] = ()
    optimization: OptimizationEntry | UnsetType = UNSET
    dynamic_batching: BatchingEntry | UnsetType = UNSET
    sequence_batching: SequenceEntry | UnsetType = UNSET
    ensemble_scheduling: JsonObject | UnsetType = UNSET
    instance_group: tuple[GroupEntry, ...] | UnsetType = UNSET
    default_model_filename: str | UnsetType = UNSET
    cc_model_filenames: JsonObject | UnsetType = UNSET
    metric_tags: JsonObject | UnsetType = UNSET
    parameters: JsonObject | UnsetType = UNSET
    model_warmup: JsonArray | UnsetType = UNSET
    model_operations: JsonObject | UnsetType = UNSET
    model_transaction_policy: TransactionEntry | UnsetType = UNSET
    model_repository_agents: JsonObject | UnsetType = UNSET
    response_cache: JsonObject | UnsetType = UNSET
    model_metrics: JsonObject | UnsetType = UNSET

    def json(self) -> bytes:
        return msgspec.json.encode(self)

    def as_dict(self) -> JsonObject:
        """Return a copy as a dictionary, the interface of protobuf and of Triton's models."""
        document: JsonObject = msgspec.json.decode(self.json())
        return document

    @property
    def groups(self) -> tuple[GroupEntry, ...]:
        return () if self.instance_group is UNSET else self.instance_group

    @property
    def model_file(self) -> str:
        """The value of `default_model_filename`, or "" without the field."""
        return "" if self.default_model_filename is UNSET else self.default_model_filename

    @property
    def is_iterative(self) -> bool:
        """True if the model may have a request run again (`iterative_sequence`)."""
        return self.sequence_batching is not UNSET and self.sequence_batching.iterative_sequence

    @property
    def graph_level(self) -> int:
        """The value of `optimization.graph.level`, 0 by default."""
        if self.optimization is UNSET or self.optimization.graph is UNSET:
            return 0
        return self.optimization.graph.level
