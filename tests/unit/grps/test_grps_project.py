"""GRPS projects in the repository: recognised projects, and messages about the rest."""

import json
from pathlib import Path

import pytest

from shmserve import repository
from shmserve.errors import ConfigError
from shmserve.grps.repository import project_files

INFERENCE = """
models:
  - name: your_model
    version: 1.0.0
    device: cpu
    inferer_type: customized
    inferer_name: your_inferer
    inferer_path:
    inferer_args: { pred_length: 3 }
    converter_type: customized
    converter_name: your_converter
    batching: { type: none, max_batch_size: 16, batch_timeout_us: 1000 }
dag:
  type: sequential
  name: your_dag
  nodes:
    - { name: node-1, type: model, model: your_model-1.0.0 }
"""
SERVER = """
interface:
  framework: http+grpc
  host: 0.0.0.0
  port: 7080,7081
  customized_predict_http:
    path: /v1/chat/completions
    customized_body: true
    streaming_ctrl: { ctrl_mode: body_param, ctrl_key: stream, res_content_type: text/event-stream }
max_connections: 1000
max_concurrency: 4
log: { log_dir: ./logs, log_backup_count: 7 }
"""


def make(root: Path, inference: str = INFERENCE, server: str = SERVER, src: bool = True) -> Path:
    conf = root / "conf"
    conf.mkdir(parents=True)
    (conf / "inference.yml").write_text(inference)
    if server:
        (conf / "server.yml").write_text(server)
    if src:
        (root / "src").mkdir()
    return root


@pytest.mark.parametrize("where", ["p", "p/1", "p/7"])
def test_a_project_is_a_worker_without_config_pbtxt(tmp_path, where: str) -> None:
    make(tmp_path / where)
    found = repository.scan([str(tmp_path)])
    assert found.failures == {}
    (spec,) = found.models["p"].specs
    assert spec.version == ("7" if where == "p/7" else "1")
    assert (spec.backend, spec.decoupled, spec.max_batch_size) == ("grps", True, 0)
    assert [t.name for t in spec.inputs] == ["grps", "http", "http_body"]
    assert all(t.optional and (t.datatype, t.shape) == ("UINT8", (-1,)) for t in spec.inputs)
    assert [t.name for t in spec.outputs] == ["grps", "http", "http_body"]
    parameters = dict(spec.parameters)
    assert parameters.pop("grps_inference_yml") == INFERENCE
    assert parameters.pop("grps_server_yml") == SERVER
    assert parameters == {
        "grps": "message",
        "grps_version": "1.0.0",
        "grps_models": "your_model-1.0.0",
        "grps_http_path": "/v1/chat/completions",
        "grps_http_body": "true",
        "grps_streaming_ctrl_mode": "body_param",
        "grps_streaming_ctrl_key": "stream",
        "grps_streaming_ctrl_content_type": "text/event-stream",
    }
    config = json.loads(spec.config.json())
    assert config["model_transaction_policy"] == {"decoupled": True}
    assert [entry["name"] for entry in config["input"]] == ["grps", "http", "http_body"]


def test_config_pbtxt_beside_a_project_adds_instances(tmp_path) -> None:
    make(tmp_path / "p", server="")
    (tmp_path / "p" / "config.pbtxt").write_text("instance_group [ { count: 2 } ]")
    model = repository.find([str(tmp_path)], "p")
    assert [i.name for i in model.instances()] == ["p/1/0", "p/1/1"]
    assert [t.optional for t in model.specs[0].inputs] == [False]


def test_what_the_files_say(tmp_path) -> None:
    make(tmp_path / "p")
    project = project_files.read(str(tmp_path / "p"), "1", "p")
    (model,) = project.models
    assert (model.name, model.device) == ("your_model-1.0.0", "cpu")
    assert model.inferer_args == {"pred_length": 3}
    assert model.batching is None
    assert project.dag == ("your_model-1.0.0",)
    assert project.max_concurrency == 4
    text = "\n".join(project.remarks)
    assert "interface.port is not used; the settings are http_bind and grpc_bind" in text
    assert "max_connections is not used; the setting is max_connections" in text
    assert "log is not used" in text


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("inferer_type: customized", "inferer_type: tensorrt", "'tensorrt' is not supported"),
        ("inferer_type: customized", "inferer_type: tensorflow", "'tensorflow' is not supported"),
        ("converter_type: customized", "converter_type:", "converter_type is missing"),
        ("inferer_name: your_inferer", "", "inferer_name is missing"),
        ("model: your_model-1.0.0", "model: other-1.0.0", "'other-1.0.0' is not among models"),
        ("type: sequential", "type: parallel", "dag.type 'parallel' is not sequential"),
        ("type: none, max_batch_size: 16", "type: dynamic", "max_batch_size '0' is not a positive"),
        ("type: none", "type: custom", "batching.type 'custom' is not none or dynamic"),
        ("models:", "models: [", "is not YAML"),
        ("models:", "modells:", "models is not a list"),
        ("inferer_path:", "inferer_path: [3]", "inferer_path is not text"),
        ("name: your_model", "name: [1]", "name is not text"),
    ],
)
def test_a_project_that_cannot_be_served_is_refused(tmp_path, old, new, text) -> None:
    assert old in INFERENCE
    make(tmp_path / "p", INFERENCE.replace(old, new, 1))
    with pytest.raises(ConfigError, match=text) as caught:
        project_files.read(str(tmp_path / "p"), "1", "p")
    assert str(tmp_path) not in caught.value.message
    found = repository.find([str(tmp_path)], "p")
    assert text in found.failures["1"]


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ("/v1/chat/completions", "/v2/models", "not a path of its own"),
        ("/v1/chat/completions", "/a?b", "not a path of its own"),
        ("customized_body: true", "customized_body: 1", "customized_body is not true or false"),
        ("body_param", "anything", "grps_streaming_ctrl_mode is 'anything'"),
        ("max_concurrency: 4", "max_concurrency: 0", "max_concurrency '0' is not a positive"),
    ],
)
def test_a_server_yml_that_cannot_be_meant_is_refused(tmp_path, old, new, text) -> None:
    make(tmp_path / "p", server=SERVER.replace(old, new, 1))
    assert text in repository.find([str(tmp_path)], "p").failures["1"]


def test_the_same_model_twice_and_a_missing_src(tmp_path) -> None:
    entry = INFERENCE[INFERENCE.index("  - name") : INFERENCE.index("dag:")]
    make(tmp_path / "twice", INFERENCE.replace("dag:", entry + "dag:", 1))
    assert "twice" in repository.find([str(tmp_path)], "twice").failures["1"]
    make(tmp_path / "bare", src=False)
    assert "no folder 'src'" in repository.find([str(tmp_path)], "bare").failures["1"]


NATIVE = """
backend: "python"
parameters [ { key: "grps" value { string_value: "%s" } } %s ]
"""


def native(root: Path, value: str = "message", more: str = "") -> Path:
    (root / "m" / "1").mkdir(parents=True)
    (root / "m" / "1" / "model.py").write_text("")
    (root / "m" / "config.pbtxt").write_text(NATIVE % (value, more))
    return root


def test_a_native_worker_that_takes_the_message_is_completed(tmp_path) -> None:
    (spec,) = repository.find([str(native(tmp_path))], "m").specs
    assert [(t.name, t.optional) for t in spec.inputs] == [("grps", False)]
    assert not spec.decoupled
    assert json.loads(spec.config.json())["output"][0]["dims"] == [-1]


def test_the_published_configuration_may_be_loaded_again(tmp_path) -> None:
    make(tmp_path / "p")
    native(tmp_path)
    for name in ("p", "m"):
        (spec,) = repository.find([str(tmp_path)], name).specs
        again = repository.find([str(tmp_path)], name, spec.config.json().decode())
        assert again.failures == {}
        assert again.specs[0].inputs == spec.inputs


def test_a_native_worker_that_says_it_wrongly_is_refused(tmp_path) -> None:
    native(tmp_path / "a", "tensors")
    failures = repository.find([str(tmp_path / "a")], "m").failures
    assert "parameters.grps is 'tensors'" in failures["1"]
    folder = native(tmp_path / "b") / "m" / "config.pbtxt"
    folder.write_text(folder.read_text() + "max_batch_size: 4")
    assert "has no input" in repository.find([str(tmp_path / "b")], "m").failures["1"]
