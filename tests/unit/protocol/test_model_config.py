"""config.pbtxt: accepted fields, refused fields, and the JSON form."""

import json
from pathlib import Path

import msgspec
import pytest

from shmserve._generated import model_config_pb2 as pb
from shmserve.errors import ConfigError
from shmserve.protocol.triton_config import document
from shmserve.protocol.triton_config.backend_kinds import BackendKind
from shmserve.protocol.triton_config.field_table import HINTS, NO_EFFECT, SUPPORTED, schema_paths
from shmserve.protocol.triton_config.model_config import (  # type: ignore[attr-defined]
    VersionPolicy,
    parse,
    parse_dict,
    parse_json,
)
from shmserve.tensor import config_document
from shmserve.tensor.spec import ModelSpec, TensorSpec

BASE = """
backend: "python"
input [ { name: "A" data_type: TYPE_FP32 dims: [ -1, 4 ] } ]
output [ { name: "B" data_type: TYPE_STRING dims: [ 2 ] } ]
"""


def test_reads_a_whole_configuration() -> None:
    config = parse(
        BASE
        + """
        name: "m"
        max_batch_size: 8
        instance_group [ { count: 2 kind: KIND_CPU name: "g" }, { kind: KIND_AUTO } ]
        version_policy { specific { versions: [ 3, 1 ] } }
        default_model_filename: "other.py"
        parameters { key: "rerun" value { string_value: "true" } }
        parameters { key: "depth" value { string_value: "5" } }
        model_transaction_policy { decoupled: true }
        """,
        "m",
    )
    assert config.inputs == (TensorSpec("A", "FP32", (-1, -1, 4)),)
    assert config.outputs == (TensorSpec("B", "BYTES", (-1, 2)),)
    assert [group.count for group in config.instance_groups] == [2, 1]
    assert config.version_policy.select([1, 2]) == (1, 3)
    assert config.model_file == "other.py"
    spec = config.spec("3", {"B": ("x", "y")})
    assert (spec.name, spec.version, spec.platform, spec.backend) == ("m", "3", "python", "python")
    assert spec.rerun
    assert spec.decoupled
    assert spec.parameters == {"rerun": "true", "depth": "5"}
    assert spec.outputs[0].labels == ("x", "y")


def test_shape_has_no_batch_dimension_without_batching() -> None:
    assert parse(BASE, "m").inputs[0].shape == (-1, 4)


@pytest.mark.parametrize(
    "name", sorted(p.parent.name for p in Path("workers").glob("*/config.pbtxt"))
)
def test_shipped_workers_are_readable(name: str) -> None:
    config = parse(Path(f"workers/{name}/config.pbtxt").read_text(), name)
    assert config.rerun is not config.decoupled  # what was half answered is not run again
    assert config.max_batch_size == 0


def test_versions_by_policy() -> None:
    assert VersionPolicy().select([2, 10, 1]) == (10,)
    assert VersionPolicy("latest", count=2).select([2, 10, 1]) == (2, 10)
    assert VersionPolicy("latest", count=9).select([2, 1]) == (1, 2)
    assert VersionPolicy("all").select([2, 10, 1]) == (1, 2, 10)
    assert VersionPolicy("specific", versions=(4,)).select([1]) == (4,)
    latest = parse(BASE + "version_policy { latest { num_versions: 3 } }", "m")
    assert latest.version_policy.count == 3
    assert parse(BASE + "version_policy { all {} }", "m").version_policy.kind == "all"


REFUSED = {
    "ensemble_scheduling.step.model_namespace": (
        "ensemble_scheduling { step [ { model_namespace: 'x' } ] }"
    ),
    "optimization.execution_accelerators": "optimization { execution_accelerators { } }",
    "model_repository_agents.agents": "model_repository_agents { agents [ { name: 'a' } ] }",
    "input.is_shape_tensor": "input [ { name: 'C' is_shape_tensor: true } ]",
    "instance_group.passive": "instance_group [ { passive: true } ]",
    "instance_group.profile": "instance_group [ { profile: ['p'] } ]",
    "instance_group.secondary_devices": "instance_group [ { secondary_devices [ {} ] } ]",
    "cc_model_filenames": "cc_model_filenames { key: '7.5' value: 'x' }",
    "model_operations.op_library_filename": "model_operations { op_library_filename: ['x.so'] }",
    "runtime": "runtime: 'x'",
}


@pytest.mark.parametrize("field", REFUSED)
def test_unsupported_fields_are_refused_by_name(field: str) -> None:
    with pytest.raises(ConfigError, match=rf"model 'm': {field} is not supported"):
        parse(BASE + REFUSED[field], "m")


def test_what_is_refused_has_a_hint_or_is_a_part_of_what_has() -> None:
    paths = set(schema_paths())
    assert paths >= SUPPORTED | set(NO_EFFECT) | set(HINTS)
    assert not SUPPORTED & set(NO_EFFECT)
    assert not (SUPPORTED | set(NO_EFFECT)) & set(HINTS)
    assert {path.partition(".")[0] for path in HINTS | NO_EFFECT} | SUPPORTED >= {
        path for path in paths if "." not in path
    }


HINTED = """
max_batch_size: 8
dynamic_batching { preferred_batch_size: [ 4, 8 ] max_queue_delay_microseconds: 100 %s }
optimization { graph { level: 1 } priority: PRIORITY_MAX cuda { graphs: true }
  input_pinned_memory { enable: true } output_pinned_memory { enable: true }
  gather_kernel_buffer_threshold: 2 eager_batching: true }
metric_tags { key: "a" value: "b" }
model_metrics { metric_control [ { metric_identifier { family: "x" } } ] }
input [ { name: "I" data_type: TYPE_FP32 dims: [ 3, 8, 8 ] format: FORMAT_NCHW } ]
"""


def test_hints_are_accepted_and_told() -> None:
    config = parse(BASE + HINTED % "preserve_ordering: true default_queue_policy {}", "m")
    told = " ".join(config.notes)
    sequences = "sequence_batching."  # not together with dynamic_batching: test_sequence_config
    for path in NO_EFFECT:
        assert path in told or path.startswith(sequences), path
    assert "optimization.graph.level" in told  # a Python model has none
    assert json.loads(config.document.json())["input"][1]["format"] == "FORMAT_NCHW"
    shown = json.loads(config.document.json())["dynamic_batching"]
    assert shown["preferred_batch_size"] == [4, 8]
    assert shown["default_queue_policy"] == {
        "timeout_action": "REJECT",
        "default_timeout_microseconds": 0,
        "allow_timeout_override": False,
        "max_queue_size": 0,
    }
    assert parse("backend: 'onnxruntime' optimization { graph { level: 1 } }", "m").notes == ()
    assert parse(BASE, "m").notes == ()


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("max_batchsize: 4", "max_batch_size"),
        ("dynamic_batching { max_queue_delay_us: 5 }", "max_queue_delay_microseconds"),
        ('input [ { name: "X" data_type: TYPE_FLOAT32 } ]', "TYPE_FP32"),
        ('input [ { name: "X" data_type: FP32 } ]', "TYPE_FP32"),
        ('input [ { name: "X" data_type: BYTES } ]', "TYPE_STRING"),
        ('input [ { name: "X" data_type: TYPE_BYTES } ]', "TYPE_STRING"),
        ("instance_group { kind: KIND_GPUS }", "KIND_GPU"),
        ("instance_group { kind: cpu }", "KIND_CPU"),
        ('{"max_batchsize": 4}', "max_batch_size"),
        ('{"input": [{"data_type": "TYPE_FLOAT32"}]}', "TYPE_FP32"),
    ],
)
def test_misspelt_names_are_told_the_nearest(text: str, near: str) -> None:
    with pytest.raises(ConfigError) as told:
        (parse_json if text.startswith("{") else parse)(text, "m")
    assert told.value.message.endswith(f"; did you mean {near}?")
    assert "\n" not in told.value.message
    for far in ("what: 1", "name: 1"):
        with pytest.raises(ConfigError) as told:
            parse(far, "m")
        assert "did you mean" not in told.value.message


def test_explicit_defaults_are_not_refused() -> None:
    parse(
        BASE
        + """response_cache { enable: false } optimization {} runtime: ""
        input [ { name: "C" data_type: TYPE_BOOL dims: [1] format: FORMAT_NONE
                  allow_ragged_batch: false optional: true } ]""",
        "m",
    )


def test_a_model_asks_for_its_answers_to_be_kept() -> None:
    assert parse(BASE + "response_cache { enable: true }", "m").spec("1").caches_answers
    assert not parse(BASE + "response_cache { }", "m").spec("1").caches_answers
    assert not parse(BASE, "m").spec("1").caches_answers


_CACHED = "response_cache { enable: true }"
_DECOUPLED = "model_transaction_policy { decoupled: true }"
_LEVELS = "dynamic_batching { priority_levels: 2 default_priority_level: 1 %s }"
_SAMPLE = "model_warmup { inputs { key: 'A' value { data_type: TYPE_FP32 %s } } }"
_MAX_MEMORY = " parameters { key: 'max_memory' value { string_value: '%s' } }"
_C = "input [ { name: 'C' data_type: TYPE_FP32 %s } ]"
_TOLD = "max_batch_size: 4 batch_input [ { kind: BATCH_ITEM_SHAPE data_type: TYPE_%s %s } ]"
_COUNTED = _TOLD % ("INT32", "target_name: 'T' source_input: 'A'")
_SCATTER = "max_batch_size: 4 batch_output [ { target_name: '%s' source_input: 'A' } ]"
_RAGGED = "input [ { name: 'R' dims: [-1] allow_ragged_batch: true %s } ]"

BAD = [
    (_COUNTED.replace("4", "0"), "batch_input needs max_batch_size"),
    (_TOLD % ("INT64", "target_name: 'T' source_input: 'A'"), "data_type TYPE_INT64 is not TYPE_I"),
    (_TOLD % ("FP32", "target_name: 'T'"), "batch_input: source_input has 0 names, not 1"),
    (_TOLD % ("FP32", "target_name: 'T' source_input: 'Q'"), "source_input 'Q' is no input"),
    (_TOLD % ("FP32", "source_input: 'A'"), "batch_input.target_name is missing"),
    (_TOLD % ("FP32", "target_name: 'A' source_input: 'A'"), "'A' is another input already"),
    (_COUNTED + "sequence_batching { }", "batch_input does not go with sequence_batching"),
    (_COUNTED + _DECOUPLED, "with a decoupled model"),
    (_COUNTED + _RAGGED % "", "'R' needs data_type and dims and no reshape"),
    (
        _COUNTED + _RAGGED % "data_type: TYPE_FP32 reshape { shape: [ -1, 1 ] }",
        "'R' needs data_type and dims and no reshape",
    ),
    (_SCATTER % "Q", "batch_output.target_name 'Q' is no output"),
    (_SCATTER % "B" + _SCATTER[17:] % "B", "batch_output.target_name 'B' is there twice"),
    (_CACHED + _DECOUPLED, "response_cache is not supported for a decoupled model"),
    (
        _CACHED + "sequence_batching { }",
        "response_cache is not supported for a model with sequence_batching",
    ),
    ("name: 'other'", "must be the folder's name"),
    ("max_batch_size: -1", "max_batch_size -1 is negative"),
    ("platform: 'tensorrt_plan'", "platform 'tensorrt_plan' is not supported"),
    ("platform: 'onnxruntime_onnx'", "does not go with backend 'python'"),
    ("input [ { name: 'A' data_type: TYPE_FP32 dims: [1] } ]", "input 'A' is given twice"),
    ("output [ { name: 'B' data_type: TYPE_FP32 dims: [1] } ]", "output 'B' is given twice"),
    ("input [ { data_type: TYPE_FP32 dims: [1] } ]", "an input has no name"),
    ("input [ { name: 'C' data_type: 99 dims: [1] } ]", "data_type|99"),
    ("input [ { name: 'C' data_type: TYPE_FP32 dims: [2] format: FORMAT_NHWC } ]", "needs 3 dims"),
    ("input [ { name: 'C' data_type: TYPE_FP32 reshape { shape: [] } } ]", "reshape needs dims"),
    (
        _C % "dims: [2] reshape { shape: [3] }",
        r"input 'C': reshape \[3\] has other elements than dims \[2\]",
    ),
    (_C % "dims: [2, -1, 3] reshape { shape: [-1, 6] }", r"reshape \[-1, 6\] has other elements"),
    (
        "max_batch_size: 8 dynamic_batching { preferred_batch_size: 9 }",
        "preferred_batch_size 9 is not between 1 and max_batch_size 8",
    ),
    ("dynamic_batching { preferred_batch_size: 0 }", "preferred_batch_size 0 is not between 1"),
    (
        "dynamic_batching { priority_levels: 2 }",
        "dynamic_batching.default_priority_level 0 is not between 1 and priority_levels 2",
    ),
    ("dynamic_batching { default_priority_level: 1 }", "default_priority_level 1 is not between"),
    (
        "dynamic_batching { priority_levels: 99999 default_priority_level: 1 }",
        "priority_levels 99999 is more than 1000",
    ),
    (
        _LEVELS % "priority_queue_policy { key: 3 value {} }",
        "priority_queue_policy 3 is not between 1 and priority_levels 2",
    ),
    (
        _LEVELS % "preserve_ordering: true",
        "preserve_ordering allows no more than one priority level",
    ),
    (
        "dynamic_batching { preserve_ordering: true default_queue_policy { timeout_action: DELAY "
        "default_timeout_microseconds: 1 } }",
        "preserve_ordering does not go with timeout_action DELAY",
    ),
    (
        "dynamic_batching { default_queue_policy { max_queue_size: 3 } }" + _DECOUPLED,
        "a decoupled model has no priorities and no queue policies",
    ),
    ("model_warmup { name: 'w' }", "model_warmup 'w': it has no inputs"),
    ("max_batch_size: 1 model_warmup { batch_size: 2 }", "'0': batch_size 2 is more than 1"),
    ("model_warmup { name: 'w' count: 99999 }", "count 99999 is more than"),
    (_SAMPLE % "dims: -1", "model_warmup '0': input 'A': dims of a sample must be positive"),
    (_SAMPLE % "dims: 2", "one of zero_data, random_data, input_data_file is needed"),
    (_SAMPLE % "dims: 2 input_data_file: '../x'", "not a file inside"),
    ("parameters { key: 'writable_inputs' value { string_value: '1' } }", "writable_inputs is '1'"),
    (_MAX_MEMORY % "2 GiBs", "parameters.max_memory is '2 GiBs', not a size in bytes or with a"),
    (_MAX_MEMORY % "0", "parameters.max_memory is '0', not a size"),
    (_MAX_MEMORY % "", "parameters.max_memory is '', not a size"),
    ("input [ { name: 'C' data_type: TYPE_FP32 dims: [0] } ]", "dims has 0"),
    ("input [ { name: 'C' data_type: TYPE_FP32 dims: [-2] } ]", "dims has -2"),
    (
        "output [ { name: 'C' data_type: TYPE_FP32 dims: [1] label_filename: '../x' } ]",
        "label_file",
    ),
    ("output [ { name: 'C' data_type: TYPE_FP32 dims: [1] label_filename: '/etc/x' } ]", "label_f"),
    ("output [ { name: 'C' data_type: TYPE_FP32 dims: [1] label_filename: 'a//b' } ]", "label_f"),
    ("default_model_filename: '../model.py'", "not a plain file name"),
    ("default_model_filename: '..'", "not a plain file name"),
    ("default_model_filename: 'a/b'", "not a plain file name"),
    ("default_model_filename: 'a\\000b'", "not a plain file name"),
    ("instance_group [ { count: -1 } ]", "count -1 is negative"),
    ("instance_group [ { count: 100000 } ]", "more than 256"),
    ("instance_group [ { kind: KIND_GPU gpus: [0, 1] count: 129 } ]", "more than 256"),
    ("instance_group [ { kind: KIND_CPU gpus: [0] } ]", "gpus does not go with kind KIND_CPU"),
    ("instance_group [ { kind: KIND_MODEL gpus: [0] } ]", "gpus does not go with kind KIND_MODEL"),
    ("version_policy { specific {} }", "distinct positive"),
    ("version_policy { specific { versions: [0] } }", "distinct positive"),
    ("version_policy { specific { versions: [2, 2] } }", "distinct positive"),
    ("parameters { key: 'rerun' value { string_value: 'yes' } }", "rerun is 'yes'"),
    ("input { name: 'A' data_type: 18446744073709551616 }", "out of range: 18446744073709551616"),
    ("no_such_field: 1", "no_such_field"),
    ("input [", "config.pbtxt"),
]


@pytest.mark.parametrize(("text", "reason"), BAD)
def test_bad_values_are_refused(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        parse(BASE + text, "m")
    assert "\n" not in caught.value.message


def test_backend_by_name_platform_or_files() -> None:
    assert parse("platform: 'onnxruntime_onnx'", "m").backend == "onnxruntime"
    assert parse("", "m", "onnxruntime").spec("1").platform == "onnxruntime_onnx"
    assert parse("backend: 'onnxruntime'", "m", "python").model_file == "model.onnx"
    with pytest.raises(ConfigError, match="backend is missing"):
        parse("", "m")
    assert parse("platform: 'pytorch_libtorch'", "m").backend == "pytorch"
    with pytest.raises(ConfigError, match=r"backend 'vllm' is not supported \(supported: python"):
        parse("backend: 'vllm'", "m")


def test_missing_parts_are_for_models_that_can_tell_them() -> None:
    half = "input [ { name: 'A' data_type: TYPE_FP32 } ] output [ { name: 'B' dims: [1] } ]"
    for backend in ("python", "onnxruntime", "pytorch"):
        config = parse(f"backend: '{backend}' {half}", "m")
        assert (config.inputs, config.outputs) == ((), ())
    with pytest.raises(ConfigError, match="input 'A': dims is missing"):
        parse(f"backend: 'own' {half}", "m", kinds={"own": BackendKind("own", "model.own")})
    with pytest.raises(ConfigError, match="input 'A': dims is missing"):
        parse_dict(config.document.as_dict(), "m", partial=False)


def test_model_kind_is_for_python_only() -> None:
    group = "instance_group [ { kind: KIND_MODEL } ]"
    assert parse(BASE + group, "m").instance_groups[0].kind == "KIND_MODEL"
    with pytest.raises(ConfigError, match="KIND_MODEL is not supported by backend 'onnxruntime'"):
        parse("backend: 'onnxruntime'" + group, "m")


def test_json_form_is_complete_ordered_and_numeric() -> None:
    found = json.loads(parse(BASE, "m").document.json())
    first = "name platform backend runtime version_policy max_batch_size"
    assert list(found)[:6] == first.split()
    assert found["version_policy"] == {"latest": {"num_versions": 1}}
    assert found["input"][0] == {
        "name": "A",
        "data_type": "TYPE_FP32",
        "format": "FORMAT_NONE",
        "dims": [-1, 4],
        "is_shape_tensor": False,
        "allow_ragged_batch": False,
        "optional": False,
        "is_non_linear_format_io": False,
    }
    assert found["instance_group"][0]["kind"] == "KIND_AUTO"
    assert found["instance_group"][0]["count"] == 1
    assert found["default_model_filename"] == "model.py"
    assert found["model_transaction_policy"] == {"decoupled": False}
    assert found["parameters"] == {}
    versions = parse(BASE + "version_policy { specific { versions: [7] } }", "m").document.json()
    assert json.loads(versions)["version_policy"] == {"specific": {"versions": [7]}}
    parameters = parse(BASE + "parameters { key: 'a' value { string_value: 'b' } }", "m")
    found = json.loads(parameters.document.json())
    assert found["parameters"] == {"a": {"string_value": "b"}}


def test_json_form_is_read_back() -> None:
    groups = " instance_group [ { kind: KIND_GPU gpus: [1, 0] }, { count: 2 } ]"
    config = parse(BASE + "max_batch_size: 3" + groups, "m")
    assert parse_json(config.document.json(), "m") == config  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="nonsense"):
        parse_json('{"nonsense": 1}', "m")
    with pytest.raises(ConfigError, match="config"):
        parse_json("{", "m")
    with pytest.raises(ConfigError, match="ensemble_scheduling needs platform"):
        parse_json('{"backend": "python", "ensemble_scheduling": {}}', "m")


def test_completed_json_keeps_what_was_told() -> None:
    config = parse("backend: 'onnxruntime' max_batch_size: 2", "m")
    spec = config.spec("1")
    inputs, outputs = (TensorSpec("X", "FP16", (-1, 3)),), (TensorSpec("Y", "BYTES", (-1,)),)
    complete = msgspec.structs.replace(spec, inputs=inputs, outputs=outputs)
    found = json.loads(document.completed(complete).config.json())
    assert found["input"][0]["dims"] == [3]
    assert found["input"][0]["data_type"] == "TYPE_FP16"
    assert found["output"][0] == {
        "name": "Y",
        "data_type": "TYPE_STRING",
        "dims": [],
        "label_filename": "",
        "is_shape_tensor": False,
        "is_non_linear_format_io": False,
    }
    assert parse_json(json.dumps({**found, "output": []}), "m").inputs[0].shape == (-1, 3)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (config_document.ConfigDocument, pb.ModelConfig),
        (config_document.InputEntry, pb.ModelInput),
        (config_document.OutputEntry, pb.ModelOutput),
        (config_document.GroupEntry, pb.ModelInstanceGroup),
        (config_document.BatchingEntry, pb.ModelDynamicBatching),
        (config_document.OptimizationEntry, pb.ModelOptimizationPolicy),
        (config_document.BatchInputEntry, pb.BatchInput),
        (config_document.BatchOutputEntry, pb.BatchOutput),
        (config_document.SequenceEntry, pb.ModelSequenceBatching),
        (config_document.ControlInputEntry, pb.ModelSequenceBatching.ControlInput),
        (config_document.ControlEntry, pb.ModelSequenceBatching.Control),
        (config_document.StateEntry, pb.ModelSequenceBatching.State),
        (config_document.InitialStateEntry, pb.ModelSequenceBatching.InitialState),
        (config_document.DirectEntry, pb.ModelSequenceBatching.StrategyDirect),
        (config_document.OldestEntry, pb.ModelSequenceBatching.StrategyOldest),
    ],
)
def test_the_document_has_the_names_of_the_schema_in_its_order(kind, message) -> None:
    assert list(kind.__struct_fields__) == [field.name for field in message.DESCRIPTOR.fields]


def test_a_document_travels_with_the_spec() -> None:
    text = BASE + "max_batch_size: 4 optimization { graph { level: 1 } } response_cache {}"
    spec = parse(text, "m").spec("1")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ModelSpec) == spec
    assert spec.config.graph_level == 1
    assert spec.config.model_file == "model.py"
