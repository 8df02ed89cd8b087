"""Folders with MLServer's model-settings.json."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from shmserve import repository
from shmserve.errors import ConfigError
from shmserve.repository import no_models

SKLEARN = "mlserver_sklearn.SKLearnModel"


def make(root: Path, implementation: str = SKLEARN, at: str = "", **fields: Any) -> Path:
    folder = root / "m"
    (folder / at).mkdir(parents=True, exist_ok=True)
    settings = {"implementation": implementation, **fields}
    (folder / at / "model-settings.json").write_text(json.dumps(settings))
    (folder / at / "model.joblib").touch()
    return folder


@pytest.mark.parametrize(
    ("version", "expected"),
    [("2", "2"), ("v0.1.0", "1"), ("", "1"), ("0", "1"), (None, "1"), ("9" * 5000, "1")],
)
def test_a_folder_is_one_version(tmp_path: Path, version: str | None, expected: str) -> None:
    folder = make(tmp_path, parameters={"uri": "./model.joblib", "version": version})
    found = repository.read_folder(str(folder))
    assert [(s.version, s.backend, s.config.model_file) for s in found.specs] == [
        (expected, "sklearn", "model.joblib")
    ]
    assert list(repository.scan([str(tmp_path)]).models) == ["m"]


def test_a_folder_served_by_its_path_alone(tmp_path: Path) -> None:
    """As `NAME=PATH` in `model_repository` lays such a folder out."""
    folder = make(tmp_path, parameters={"uri": "./model.joblib", "version": "7"})
    (tmp_path / "single/own").mkdir(parents=True)
    (tmp_path / "single/own/1").symlink_to(folder)
    (spec,) = repository.read_folder(str(tmp_path / "single/own")).specs
    assert (spec.name, spec.version, spec.backend) == ("own", "1", "sklearn")


def test_each_version_folder_may_have_settings(tmp_path: Path) -> None:
    for version in "12":
        folder = make(tmp_path, at=version, name="m")
    assert [s.version for s in repository.read_folder(str(folder)).specs] == ["2"]


def test_each_version_has_the_file_of_its_own_settings(tmp_path: Path) -> None:
    for version in "123":
        folder = make(tmp_path, at=version, parameters={"uri": f"{version}.joblib"})
        (folder / version / f"{version}.joblib").touch()
    (folder / "2/2.joblib").unlink()
    text = '{"backend": "sklearn", "version_policy": {"all": {}}}'
    found = repository.read_folder(str(folder), text)
    assert [(s.version, s.config.model_file) for s in found.specs] == [
        ("1", "1.joblib"),
        ("3", "3.joblib"),
    ]
    assert found.failures == {"2": "version 2 has no file '2.joblib'"}
    (folder / "config.pbtxt").write_text('backend: "sklearn"')
    assert repository.read_folder(str(folder)).specs[0].config.model_file == "model.joblib"


@pytest.mark.parametrize("file", ["model.joblib", "model.onnx", "model.py"])
def test_a_version_folder_does_not_hide_the_settings_beside(tmp_path: Path, file: str) -> None:
    """MLServer knows no folders of versions: a folder `1` may hold anything."""
    folder = make(tmp_path, parameters={"uri": "./1/weights.joblib", "version": "3"})
    (folder / "1").mkdir()
    for name in (file, "weights.joblib"):
        (folder / "1" / name).touch()
    (spec,) = repository.read_folder(str(folder)).specs
    found = spec.version, spec.backend, spec.config.model_file
    assert found == ("3", "sklearn", "1/weights.joblib")
    (folder / "model-settings.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model-settings\.json: "):
        repository.read_folder(str(folder))


@pytest.mark.parametrize("version", ["1", "3"])
def test_a_file_in_a_version_folder_beside_settings_is_named(tmp_path: Path, version: str) -> None:
    """So is Triton's folder with settings beside."""
    folder = make(tmp_path, parameters={"version": version})
    (folder / "2").mkdir()
    (folder / "model.joblib").rename(folder / "2/model.joblib")
    assert repository.read_folder(str(folder)).failures == {
        version: f"version {version} has no file 'model.joblib': name 2/model.joblib in"
        " parameters.uri of model-settings.json, or remove this file, beside which '2' is no"
        " version"
    }


def test_settings_in_the_folder_and_in_a_version_folder_are_refused(tmp_path: Path) -> None:
    folder = make(tmp_path)
    make(tmp_path, at="2")
    with pytest.raises(ConfigError, match=r"in its folder and in folder '2': remove the one"):
        repository.read_folder(str(folder))


@pytest.mark.parametrize("beside", ["an implementation of one's own", "config.pbtxt"])
def test_version_folders_come_first_where_settings_are_not_served(
    tmp_path: Path, beside: str
) -> None:
    folder = make(tmp_path, "model.MyModel" if "own" in beside else SKLEARN)
    (folder / "2").mkdir()
    (folder / "2/model.onnx").touch()
    if beside == "config.pbtxt":
        (folder / beside).write_text('backend: "onnxruntime"')
    (spec,) = repository.read_folder(str(folder)).specs
    assert (spec.version, spec.backend) == ("2", "onnxruntime")


def test_fields_become_a_configuration(tmp_path: Path) -> None:
    folder = make(
        tmp_path,
        name="m",
        platform="sklearn",
        inputs=[{"name": "x", "datatype": "INT64", "shape": [-1, 4]}],
        outputs=[{"name": "predict", "datatype": "FP32", "shape": [-1]}],
        max_batch_size=16,
        max_batch_time=0.5,
        parameters={"uri": "weights/deep.joblib", "extra": {"task": "x", "number": 3}},
    )
    (folder / "weights").mkdir()
    (folder / "weights/deep.joblib").touch()
    (spec,) = repository.read_folder(str(folder)).specs
    assert spec.config.model_file == "weights/deep.joblib"
    assert spec.parameters == {"task": "x"}
    assert [(t.name, t.datatype, t.shape) for t in spec.inputs] == [("x", "INT64", (-1, 4))]
    assert spec.max_batch_size == 16
    assert spec.config.dynamic_batching.max_queue_delay_microseconds == 500_000


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"name": "other"}, "name 'other' must be the folder's name"),
        ({"parameters": {"uri": "../x.joblib"}}, "uri '../x.joblib' is not inside the folder of"),
        ({"parameters": {"uri": "/etc/passwd"}}, "uri '/etc/passwd' is not inside"),
        ({"parameters": {"uri": "s3://b/m"}}, "uri 's3://b/m' is not inside"),
        ({"parameters": {"uri": "a\0b"}}, r"uri 'a\x00b' is not inside"),
        ({"parameters": {"uri": "./none.joblib"}}, "has no file 'none.joblib'"),
        (
            {"inputs": [{"name": "x", "datatype": "FP31"}]},
            "datatype 'FP31' of input 'x' is unknown",
        ),
        (
            {"inputs": [{"name": "x\n", "datatype": "FP\x1b"}]},
            r"datatype 'FP\x1b' of input 'x\n' is unknown",
        ),
        ({"name": "a\nb"}, r"name 'a\nb' must be the folder's name"),
        ({"max_batch_size": "many"}, "Expected `int`, got `str`"),
        ({"max_batch_size": 4, "max_batch_time": 1e308}, "Expected `float` <= 1000000000.0"),
    ],
)
def test_wrong_fields_are_named(tmp_path: Path, fields: dict[str, Any], text: str) -> None:
    make(tmp_path, **fields)
    (tmp_path / "fine/1").mkdir(parents=True)
    (tmp_path / "fine/1/model.onnx").touch()
    found = repository.scan([str(tmp_path)])
    assert "fine" in found.models
    reasons = [*found.failures.values(), *getattr(found.models.get("m"), "failures", {}).values()]
    assert text in " ".join(reasons)


def test_a_file_may_be_a_link_and_its_path_absolute(tmp_path: Path) -> None:
    folder = make(tmp_path, parameters={"uri": str(tmp_path / "m/model.pkl")})
    (tmp_path / "blob").touch()
    (folder / "model.pkl").symlink_to(tmp_path / "blob")
    (tmp_path / "other/m").mkdir(parents=True)
    (tmp_path / "other/m/1").symlink_to(folder)
    for directory in (folder, tmp_path / "other/m"):
        (spec,) = repository.read_folder(str(directory)).specs
        assert spec.config.model_file == "model.pkl"


def test_config_pbtxt_comes_first(tmp_path: Path) -> None:
    folder = make(tmp_path, name="other")
    (folder / "config.pbtxt").write_text('backend: "sklearn" max_batch_size: 3')
    assert repository.read_folder(str(folder)).specs[0].max_batch_size == 3


def test_the_configuration_of_a_load_request_takes_the_place_of_the_settings(
    tmp_path: Path,
) -> None:
    """As of a config.pbtxt; where the model lies is still told by the settings."""
    fields = {"uri": "./deep.joblib", "version": "3", "extra": {"task": "x"}}
    folder = make(tmp_path, max_batch_size=8, inputs=[{"name": "x"}], parameters=fields)
    (folder / "deep.joblib").touch()
    (spec,) = repository.read_folder(str(folder), '{"max_batch_size": 4}').specs
    found = spec.version, spec.backend, spec.config.model_file, spec.max_batch_size
    assert found == ("3", "sklearn", "deep.joblib", 4)
    assert (spec.inputs, spec.parameters) == ((), {})


@pytest.mark.parametrize("backend", ["onnxruntime", "python", "pytorch"])
def test_another_backend_needs_folders_of_versions(tmp_path: Path, backend: str) -> None:
    folder = make(tmp_path)
    for file in ("model.onnx", "model.py", "model.pt2"):
        (folder / file).touch()
    text = json.dumps({"backend": backend})
    assert repository.read_folder(str(folder), text).failures == {
        "1": f"version 1: backend '{backend}' needs a version folder, and beside"
        " model-settings.json none counts: name another backend, or remove this file"
    }


def test_other_implementations_get_advice(tmp_path: Path) -> None:
    folder = make(tmp_path, "model.MyModel")
    assert not repository.scan([str(tmp_path)]).models
    assert "implementation that is not served here" in no_models.of_folder(str(folder))


def test_the_name_of_a_model_is_the_settings_name(tmp_path: Path) -> None:
    folder = make(tmp_path, name="iris")
    assert no_models.name_of(str(folder)) == "iris"
    assert no_models.sign_of_model(str(folder)) == "model-settings.json"
    os.unlink(folder / "model-settings.json")
    assert no_models.name_of(str(folder)) == "m"


def test_a_file_of_another_library_beside_a_model_py_is_its_own_business(tmp_path: Path) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    for file in ("model.py", "model.joblib"):
        (tmp_path / "m/1" / file).touch()
    assert repository.read_folder(str(tmp_path / "m")).config.backend == "python"
    os.unlink(tmp_path / "m/1/model.py")
    assert repository.read_folder(str(tmp_path / "m")).config.backend == "sklearn"


def test_a_pipe_is_no_model_file(tmp_path: Path) -> None:
    (tmp_path / "m/1").mkdir(parents=True)
    os.mkfifo(tmp_path / "m/1/model.json")
    assert "m" in repository.scan([str(tmp_path)]).failures
