"""config.pbtxt of ensembles."""

import msgspec
import pytest

from shmserve.errors import ConfigError
from shmserve.protocol.triton_config.model_config import of_spec, parse
from shmserve.tensor.spec import EnsembleStep, ModelSpec

TENSORS = (
    'input { name: "IN" data_type: TYPE_FP32 dims: [ 4 ] } '
    'output { name: "OUT" data_type: TYPE_FP32 dims: [ 4 ] } '
)
STEP = (
    'step { model_name: "m" model_version: 2 input_map { key: "X" value: "IN" } '
    'output_map { key: "Y" value: "OUT" } }'
)
BASE = f'platform: "ensemble" max_batch_size: 8 {TENSORS}'


def test_an_ensemble() -> None:
    config = parse(f"{BASE} ensemble_scheduling {{ {STEP} }}", "e")
    spec = config.spec("1")
    assert spec.steps == (EnsembleStep("m", "2", {"X": "IN"}, {"Y": "OUT"}),)
    assert (spec.platform, spec.inputs[0].shape) == ("ensemble", (-1, 4))
    assert config.instance_groups == ()
    shown = msgspec.json.decode(spec.config.json())
    assert (shown["platform"], shown["backend"]) == ("ensemble", "")
    assert shown["ensemble_scheduling"]["step"] == [
        {
            "model_name": "m",
            "model_version": 2,
            "input_map": {"X": "IN"},
            "output_map": {"Y": "OUT"},
            "model_namespace": "",
        }
    ]
    assert of_spec(spec).steps == spec.steps
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=ModelSpec) == spec
    latest = parse(f"{BASE} ensemble_scheduling {{ {STEP} }}".replace("2 input", "-1 input"), "e")
    assert latest.steps[0].version == ""
    assert spec.max_inflight_requests == 0
    bounded = parse(f"{BASE} ensemble_scheduling {{ {STEP} max_inflight_requests: 3 }}", "e")
    assert bounded.spec("1").max_inflight_requests == 3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (BASE, "must specify 'step' for ensemble 'e'"),
        (
            f"{BASE} ensemble_scheduling {{ {STEP} }} "
            "parameters { key: 'max_memory' value { string_value: '2GiB' } }",
            "parameters.max_memory '2GiB' is for the steps of an ensemble",
        ),
        (f"{BASE} ensemble_scheduling {{ step {{}} }}", "must specify 'model_name' in step 0 of"),
        (
            f"{BASE} ensemble_scheduling {{ {STEP} step {{ model_name: 'm' }} }}",
            "must specify 'input_map' in step 1 of ensemble 'e'",
        ),
        (
            f"{BASE} ensemble_scheduling {{ step {{ model_name: 'm' "
            "input_map { key: 'X' value: 'IN' } } }",
            "must specify 'output_map' in step 0",
        ),
        (f"{BASE} ensemble_scheduling {{ {STEP} }}".replace('"m"', '"../m"'), "not a valid model"),
        (
            f"{BASE} ensemble_scheduling {{ {STEP} }}".replace("version: 2", "version: 0"),
            "model_version 0 in step 0 of ensemble 'e' is neither -1",
        ),
        (f"{BASE} ensemble_scheduling {{ {STEP} }}".replace('"X"', '""'), "a name .* is empty"),
        (f"{BASE} ensemble_scheduling {{ {STEP} {STEP} }}", "tensor 'OUT' is given twice"),
        (
            f"{BASE} ensemble_scheduling {{ {STEP} max_inflight_requests: 1025 }}",
            "max_inflight_requests 1025 of ensemble 'e' is more than 1024",
        ),
        (f"{BASE} dynamic_batching {{}}", "dynamic_batching does not go with ensemble 'e'"),
        (f"{BASE} backend: 'python'", "backend should not be specified for ensemble 'e'"),
        (f"{BASE} instance_group {{ count: 2 }}", "instance_group should not be specified"),
        (f"{BASE} model_warmup {{ name: 'a' }}", "model_warmup should not be specified"),
        (f"{BASE}".replace("[ 4 ]", "[ 4 ] reshape { shape: [ 2, 2 ] }", 1), "reshape of 'IN'"),
        (
            f"backend: 'python' {TENSORS} ensemble_scheduling {{ {STEP} }}",
            "ensemble_scheduling needs platform 'ensemble'",
        ),
        ("backend: 'ensemble'", "backend 'ensemble' is not supported"),
    ],
)
def test_what_is_refused(text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        parse(text, "e")
