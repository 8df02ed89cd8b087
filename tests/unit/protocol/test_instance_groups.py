"""Instance groups on a host's devices: placement, view of clients, refusals."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmserve import repository
from shmserve.errors import ConfigError
from shmserve.protocol.triton_config.backend_kinds import BUILT_IN
from shmserve.protocol.triton_config.instance_groups import InstanceGroup, placed, places
from shmserve.repository import model_folder

CONFIG = """
backend: "%s"
input [ { name: "A" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "B" data_type: TYPE_FP32 dims: [ 2 ] } ]
instance_group [ %s ]
"""
FILES = {"python": "model.py", "pytorch": "model.pt", "onnxruntime": "model.onnx"}


@pytest.fixture
def host(monkeypatch):
    """Set the visible devices, and whether CuPy is installed."""

    def prepare(tokens=(), cupy=True):
        monkeypatch.setattr(model_folder.gpus, "visible_devices", lambda: tuple(tokens))  # type: ignore[attr-defined]
        monkeypatch.setattr(
            model_folder.util,  # type: ignore[attr-defined]
            "find_spec",
            lambda name: object() if cupy and name == "cupy" else None,
        )

    return prepare


@pytest.fixture
def model(tmp_path):
    """The folder of a model 'm', read."""

    def read(groups, backend="python"):
        version = tmp_path / "m" / "1"
        version.mkdir(parents=True, exist_ok=True)
        (version / FILES[backend]).write_text("")
        (tmp_path / "m" / "config.pbtxt").write_text(CONFIG % (backend, groups))
        return repository.read_folder(str(tmp_path / "m"))

    return read


def where(folder):
    return [i.device + (" auto" if i.auto else "") for i in folder.instances()]


def test_there_is_one_instance_if_nothing_says_otherwise(model, host) -> None:
    host()
    for backend in FILES:
        assert where(model("", backend)) == ["cpu"], backend


def shown(folder):
    groups = json.loads(folder.specs[0].config.json())["instance_group"]
    return [(g["name"], g["count"], g["kind"], g["gpus"]) for g in groups]


def test_count_instances_on_each_device_that_is_named(host, model):
    host("012")
    folder = model('{ kind: KIND_GPU gpus: [2, 0] count: 2 name: "g" }, { kind: KIND_CPU }')
    assert where(folder) == ["cuda:2", "cuda:0", "cuda:2", "cuda:0", "cpu"]
    assert [i.name for i in folder.instances()] == [f"m/1/{index}" for index in range(5)]
    assert shown(folder) == [("g", 2, "KIND_GPU", [2, 0]), ("m_1", 1, "KIND_CPU", [])]
    instances = places(folder.groups["1"])
    assert [f"{p.group.name}_{p.number}" for p in instances] == 2 * ["g_0"] + 2 * ["g_1"] + [
        "m_1_0"
    ]


def test_without_gpus_it_is_every_device(host, model):
    host("01")
    folder = model("{ kind: KIND_GPU }")
    assert where(folder) == ["cuda:0", "cuda:1"]
    assert shown(folder) == [("m_0", 1, "KIND_GPU", [0, 1])]


@pytest.mark.parametrize("groups", ["", "{ }", "{ kind: KIND_AUTO }"])
def test_auto_takes_devices_where_they_can_be_used(host, model, groups):
    host("01")
    assert where(model(groups)) == ["cuda:0 auto", "cuda:1 auto"]
    assert shown(model(groups)) == [("m_0", 1, "KIND_GPU", [0, 1])]
    host("01", cupy=False)
    assert where(model(groups)) == ["cpu"]
    host("")
    assert where(model(groups)) == ["cpu"]
    assert shown(model(groups)) == [("m_0", 1, "KIND_CPU", [])]


def test_auto_with_gpus_falls_back_where_one_is_not_there(host, model):
    host("01")
    assert where(model("{ gpus: [1] count: 2 }")) == ["cuda:1 auto", "cuda:1 auto"]
    assert where(model("{ gpus: [1, 2] count: 2 }")) == ["cpu", "cpu"]


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ("01", "instance_group.gpus has 3, but there are 2 devices (0 to 1)"),
        ("0", "instance_group.gpus has 3, but there is 1 device (0)"),
        ("", "instance_group.kind KIND_GPU needs a CUDA device, and none is visible to the server"),
    ],
)
def test_devices_that_are_not_there_are_a_failure_of_the_model(host, model, tokens, reason):
    host(tokens)
    with pytest.raises(ConfigError) as caught:
        model("{ kind: KIND_GPU gpus: [0, 3] }")
    assert caught.value.message == f"model 'm': {reason}"


def test_the_others_are_served(host, model, tmp_path):
    host("")
    model("{ kind: KIND_CPU }")
    (tmp_path / "n" / "1").mkdir(parents=True)
    (tmp_path / "n" / "1" / "model.py").write_text("")
    (tmp_path / "n" / "config.pbtxt").write_text(CONFIG % ("python", "{ kind: KIND_GPU }"))
    found = repository.scan([str(tmp_path)])
    assert list(found.models) == ["m"]
    assert "needs a CUDA device" in found.failures["n"]


def test_what_needs_cupy_names_the_extra(host, model):
    host("0", cupy=False)
    for backend in ("python", "pytorch"):
        with pytest.raises(ConfigError, match=r"needs CuPy: pip install 'shmserve\[gpu\]'"):
            model("{ kind: KIND_GPU }", backend)
    assert where(model("{ kind: KIND_GPU }", "onnxruntime")) == ["cuda:0"]


def test_instances_are_counted_over_all_devices(host, model):
    host("0123")
    with pytest.raises(ConfigError, match="adds up to more than 256"):
        model("{ kind: KIND_GPU count: 65 }")
    assert len(model("{ kind: KIND_GPU count: 64 }").instances()) == 256


GROUPS = st.builds(
    InstanceGroup,
    st.sampled_from("ab"),
    st.integers(1, 4),
    st.sampled_from(["KIND_AUTO", "KIND_CPU", "KIND_GPU", "KIND_MODEL"]),
).flatmap(
    lambda group: st.builds(
        InstanceGroup,
        st.just(group.name),
        st.just(group.count),
        st.just(group.kind),
        st.lists(st.integers(-1, 4), max_size=3).map(tuple)
        if group.kind in ("KIND_AUTO", "KIND_GPU")
        else st.just(()),
    )
)


@given(st.lists(GROUPS, max_size=4), st.integers(0, 4), st.booleans())
def test_nobody_is_placed_on_a_device_that_is_not_there(groups, devices, cupy):
    try:
        found = placed(groups, "m", BUILT_IN["python"], devices, cupy)
    except ConfigError:
        assert any(group.kind == "KIND_GPU" for group in groups)
        return
    instances = places(found)
    assert len(instances) == sum(group.size for group in found)
    there = {f"cuda:{index}" for index in range(devices)}
    for place in instances:
        assert place.device == "cpu" or place.device in there
        assert place.auto is (place.group.kind == "KIND_AUTO" and place.device != "cpu")
        if place.group.kind == "KIND_GPU":
            assert place.device != "cpu"
            assert cupy


# --------------------------------------------------------------------- GRPS projects

PROJECT = """
models:
  - {name: a, version: 1.0.0, device: "%s", inferer_type: %s, inferer_name: x, converter_type: none}
  - {name: b, version: 1.0.0, device: "%s", inferer_type: %s, inferer_name: x, converter_type: none}
dag: {type: sequential, name: d, nodes: [{name: n, type: model, model: a-1.0.0}]}
"""


@pytest.fixture
def project(tmp_path):
    """A project with two models, as (device, inferer_type), read."""

    def read(first, second=("cpu", "customized"), groups=""):
        (tmp_path / "p" / "src").mkdir(parents=True, exist_ok=True)
        (tmp_path / "p" / "inference.yml").write_text(PROJECT % (*first, *second))
        (tmp_path / "p" / "config.pbtxt").write_text(f"instance_group [ {groups} ]")
        return repository.read_folder(str(tmp_path / "p"))

    return read


def test_a_project_tells_its_device(host, project):
    host("01", cupy=False)  # its models bring what they need
    folder = project(("gpu:1", "torch"))
    assert where(folder) == ["cuda:1"]
    assert shown(folder) == [("p_0", 1, "KIND_GPU", [1])]
    assert where(project(("cpu", "torch"), ("cuda", "torch"), "{ count: 2 }")) == 2 * ["cuda:0"]
    assert where(project(("original_cuda:1", "torch"))) == ["cuda:1"]
    assert where(project(("cpu", "torch"))) == ["cpu"]


def test_a_projects_own_code_may_do_without(host, project):
    host("01")
    own = ("cuda:1", "customized")
    assert where(project(own)) == ["cuda:1 auto"]
    assert where(project(own, groups="{ kind: KIND_CPU }")) == ["cpu"]
    host("0")
    assert where(project(own)) == ["cpu"]
    assert where(project(own, ("cuda:0", "torch"))) == ["cuda:0"]


@pytest.mark.parametrize(
    ("tokens", "device", "groups", "reason"),
    [
        ([], "cuda", "", "device 'cuda' needs a CUDA device, but there is none"),
        (["0"], "gpu:2", "", "device 'gpu:2' needs a CUDA device, but there is 1 device (0)"),
        (["0"], "gpu", "{ kind: KIND_CPU }", "'gpu' does not go with instance_group.kind KIND_CPU"),
        (["MIG-a", "MIG-b"], "gpu:1", "", "devices are several MIG devices"),
    ],
)
def test_a_projects_device_that_cannot_be(host, project, tokens, device, groups, reason):
    host(tokens)
    folder = project((device, "torch"), ("cuda:0", "torch"), groups)
    assert not folder.specs
    assert (
        f"model 'p': inference.yml: {reason}" in folder.failures["1"]
        or reason in (folder.failures["1"])
    )


def test_config_pbtxt_leaves_a_projects_device_to_it(host, project):
    host("0")
    for groups in ("{ kind: KIND_GPU }", "{ gpus: [0] }"):
        with pytest.raises(ConfigError, match="instance_group"):
            project(("cpu", "torch"), groups=groups)


def test_shipped_workers_stay_on_the_cpu(host):
    host("01")
    for folder in repository.scan(["workers"]).models.values():
        if not folder.name.startswith("gpu_"):
            assert set(where(folder)) == {"cpu"}, folder.name


def test_paths_of_the_repository_do_not_matter(host, model, tmp_path):
    host("0")
    folder = model("{ kind: KIND_GPU }")
    assert folder.instances()[0].directory == str(tmp_path / "m")
