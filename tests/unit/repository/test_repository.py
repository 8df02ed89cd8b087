"""Scanning repositories: models found, and messages about the rest."""

import contextlib
import json
import os
import tempfile
from pathlib import Path

import pytest

from shmserve import repository
from shmserve.errors import ConfigError, NotFound
from tests.integration.region_client import OTHER_UID, as_user

CONFIG = """
backend: "python"
input [ { name: "A" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "B" data_type: TYPE_FP32 dims: [ 2 ] %s } ]
"""


def make(root: Path, name: str, extra: str = "", versions: str = "1", label: str = "") -> Path:
    folder = root / name
    folder.mkdir(parents=True)
    for version in versions.split():
        (folder / version).mkdir()
        (folder / version / "model.py").write_text("")
    (folder / "config.pbtxt").write_text(CONFIG % label + extra)
    return folder


def test_finds_models_of_several_paths(tmp_path) -> None:
    make(tmp_path / "one", "a", "instance_group [ { count: 2 } ]", "1 2 10")
    make(tmp_path / "two", "b", "version_policy { all {} }", "3 4")
    found = repository.scan([str(tmp_path / "one"), str(tmp_path / "two")])
    assert found.failures == {}
    a, b = found.models["a"], found.models["b"]
    assert [spec.version for spec in a.specs] == ["10"]
    assert [i.name for i in a.instances()] == ["a/10/0", "a/10/1"]
    assert [spec.version for spec in b.specs] == ["3", "4"]
    assert [i.name for i in b.instances(b.specs[1])] == ["b/4/0"]
    instance = a.instances()[0]
    assert instance.directory == str(tmp_path / "one" / "a")
    assert instance.device == "cpu"
    assert instance.spec is a.specs[0]


def test_shipped_workers(tmp_path) -> None:
    found = repository.scan(["workers"])
    assert found.failures == {}
    assert set(found.models) >= {"digits", "add_sub", "identity", "identity_bytes", "noop"}
    labels = found.models["digits"].specs[0].outputs[1].labels
    assert labels == tuple("0123456789")


def test_a_name_in_two_paths_is_a_failure(tmp_path) -> None:
    make(tmp_path / "one", "a")
    make(tmp_path / "two", "a")
    found = repository.scan([str(tmp_path / "one"), str(tmp_path / "two")])
    assert found.models == {}
    assert found.failures == {"a": "model appears in two or more repositories"}
    with pytest.raises(ConfigError, match="two or more repositories"):
        repository.find([str(tmp_path / "one"), str(tmp_path / "two")], "a")


def test_the_same_path_twice_is_no_duplicate(tmp_path) -> None:
    make(tmp_path / "one", "a")
    (tmp_path / "link").symlink_to(tmp_path / "one")
    found = repository.scan([str(tmp_path / "one"), str(tmp_path / "link")])
    assert set(found.models) == {"a"}


def test_hidden_and_plain_files_are_left_out(tmp_path) -> None:
    make(tmp_path, "a")
    (tmp_path / ".git").mkdir()
    (tmp_path / "README.md").write_text("")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "nowhere").symlink_to(tmp_path / "absent")
    found = repository.scan([str(tmp_path)])
    assert set(found.models) == {"a"}
    assert found.failures == {}


def test_folders_that_are_no_models_are_skipped_and_told_in_one_line(tmp_path, caplog) -> None:
    make(tmp_path, "a")
    (tmp_path / "__pycache__/1").mkdir(parents=True)
    (tmp_path / "notes/drafts").mkdir(parents=True)
    (tmp_path / "new").mkdir()
    caplog.set_level("INFO")
    found = repository.scan([str(tmp_path)])
    assert set(found.models) == {"a"}
    assert found.failures == {}
    assert caplog.messages == [
        "skipped folders without a version and config.pbtxt: __pycache__, new, notes"
        " (`shmserve check` says more)"
    ]
    assert repository.names([str(tmp_path)]) == ["a"] == list(repository.survey([str(tmp_path)]))
    with pytest.raises(ConfigError, match=r"config.pbtxt is missing"):
        repository.find([str(tmp_path)], "new")  # a request for the model is told


def test_a_scan_does_not_look_into_other_folders_more_than_it_must(tmp_path, monkeypatch) -> None:
    """Folders within folders are looked at only for an operator, and only a few of them."""
    make(tmp_path, "a")
    for number in range(300):
        (tmp_path / f"data/c{number}").mkdir(parents=True)
    opened: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: opened.append(str(path)) or scandir(path))
    found = repository.scan([str(tmp_path)])
    assert not [path for path in opened if f"{tmp_path}/data/" in path]
    assert found.skipped() == [f"{tmp_path}/data has neither 1/model.py or 1/model.onnx or"
                               " 1/model.pt or 1/model.pt2 nor config.pbtxt"]  # fmt: skip
    assert len(opened) < 150


@pytest.mark.parametrize("there", ["config.pbtxt", "1/"])
def test_what_may_be_meant_as_a_model_is_a_failure(tmp_path, there: str) -> None:
    (tmp_path / "m" / there).parent.mkdir(parents=True)
    (tmp_path / "m" / there).mkdir()
    assert set(repository.scan([str(tmp_path)]).failures) == {"m"}


def test_bad_names_are_failures(tmp_path) -> None:
    (tmp_path / "bad name/1").mkdir(parents=True)
    os.makedirs(os.fsencode(tmp_path) + b"/\xff\xfe/1")
    found = repository.scan([str(tmp_path)])
    assert found.models == {}
    assert found.failures["bad name"].startswith("'bad name' is not a valid model name, it has ' '")
    other = next(name for name in found.failures if name != "bad name")
    assert other.isascii()
    for reason in found.failures.values():
        reason.encode()


def test_only_positive_numbers_are_versions(tmp_path) -> None:
    folder = make(tmp_path, "a", "version_policy { all {} }", "1")
    for name in ("0", "01", "-1", "x", "1.0", "training", "²", "9" * 30):
        (folder / name).mkdir()
    (folder / "7").write_text("a file")
    found = repository.read_folder(str(folder))
    assert [spec.version for spec in found.specs] == ["1"]
    assert found.failures == {}


def test_no_version_at_all(tmp_path) -> None:
    folder = make(tmp_path, "a", versions="")
    with pytest.raises(ConfigError, match=r"no version folder .a positive number. is there$"):
        repository.read_folder(str(folder))
    (folder / "model.py").touch()
    with pytest.raises(ConfigError, match=r"is there: move model.py to 1/model.py$"):
        repository.read_folder(str(folder))
    folder = make(tmp_path, "e", versions="")
    (folder / "config.pbtxt").write_text(
        """platform: "ensemble"
        input { name: "X" data_type: TYPE_FP32 dims: [ 1 ] }
        output { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] }
        ensemble_scheduling { step {
            model_name: "a" model_version: -1
            input_map { key: "X" value: "X" } output_map { key: "Y" value: "Y" } } }"""
    )
    with pytest.raises(ConfigError, match=r"is there: an ensemble needs an empty folder '1'$"):
        repository.read_folder(str(folder))


def test_missing_model_file_fails_that_version_only(tmp_path) -> None:
    folder = make(tmp_path, "a", "version_policy { all {} }", "1 2")
    (folder / "2" / "model.py").unlink()
    found = repository.read_folder(str(folder))
    assert [spec.version for spec in found.specs] == ["1"]
    assert found.failures == {"2": "version 2 has no file 'model.py'"}
    assert found.config.spec("2").version == "2"


def test_specific_version_that_is_not_there(tmp_path) -> None:
    folder = make(tmp_path, "a", "version_policy { specific { versions: [1, 5] } }", "1 2")
    found = repository.read_folder(str(folder))
    assert [spec.version for spec in found.specs] == ["1"]
    assert found.failures == {"5": "version 5 is not in the repository"}


def test_model_file_of_another_name(tmp_path) -> None:
    folder = make(tmp_path, "a", 'default_model_filename: "other.py"')
    assert repository.read_folder(str(folder)).failures == {"1": "version 1 has no file 'other.py'"}
    (folder / "1" / "other.py").write_text("")
    assert repository.read_folder(str(folder)).failures == {}


def test_config_is_optional_for_models_that_tell(tmp_path) -> None:
    onnx = tmp_path / "o" / "1"
    onnx.mkdir(parents=True)
    (onnx / "model.onnx").write_text("")
    spec = repository.read_folder(str(onnx.parent)).specs[0]
    assert (spec.backend, spec.inputs, spec.outputs) == ("onnxruntime", (), ())
    folder = make(tmp_path, "p")
    (folder / "config.pbtxt").unlink()
    assert repository.read_folder(str(folder)).specs[0].backend == "python"
    (folder / "1" / "model.py").rename(folder / "1" / "model.pt")
    with pytest.raises(ConfigError, match=r"config.pbtxt is missing .a TorchScript model does"):
        repository.read_folder(str(folder))
    (folder / "1" / "model.pt").rename(folder / "1" / "model.pt2")
    assert repository.read_folder(str(folder)).specs[0].config.model_file == "model.pt2"
    (folder / "1" / "model.pt2").rename(folder / "1" / "model.bin")
    with pytest.raises(ConfigError, match=r"config.pbtxt is missing$"):
        repository.read_folder(str(folder))


def test_a_torchscript_model_needs_all_of_its_tensors(tmp_path) -> None:
    folder = make(tmp_path, "p")
    (folder / "config.pbtxt").write_text("backend: 'pytorch' input [ { name: 'A' dims: [ 1 ] } ]")
    (folder / "1" / "model.pt").write_text("")
    failures = repository.read_folder(str(folder)).failures
    assert failures == {"1": "model 'p': input 'A': data_type or dims is missing"}
    (folder / "1" / "model.pt").rename(folder / "1" / "model.pt2")
    assert repository.read_folder(str(folder)).failures == {}


def test_backend_is_guessed_from_the_file(tmp_path) -> None:
    folder = make(tmp_path, "p")
    text = (folder / "config.pbtxt").read_text().replace('backend: "python"', "")
    (folder / "config.pbtxt").write_text(text)
    assert repository.read_folder(str(folder)).config.backend == "python"


def test_configs_that_cannot_be_read(tmp_path) -> None:
    folder = make(tmp_path, "a")
    config = folder / "config.pbtxt"
    config.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        repository.read_folder(str(folder))
    config.write_text("#" * (1 << 20) + "\n")
    with pytest.raises(ConfigError, match="more than 1048576 bytes"):
        repository.read_folder(str(folder))
    config.unlink()
    os.mkfifo(config)
    with pytest.raises(ConfigError, match="not a regular file"):
        repository.read_folder(str(folder))
    config.unlink()
    config.symlink_to(tmp_path / "absent")
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        repository.read_folder(str(folder))
    assert str(tmp_path) not in caught.value.message


def test_labels(tmp_path) -> None:
    folder = make(tmp_path, "a", label='label_filename: "names/l.txt"')
    (folder / "names").mkdir()
    (folder / "names" / "l.txt").write_text("cat \r\ndog\n\n")
    spec = repository.read_folder(str(folder)).specs[0]
    assert spec.outputs[0].labels == ("cat", "dog")


def test_labels_must_be_inside_and_there(tmp_path) -> None:
    folder = make(tmp_path, "a", label='label_filename: "l.txt"')
    with pytest.raises(ConfigError, match="of output 'B' cannot be read"):
        repository.read_folder(str(folder))
    (tmp_path / "secret").write_text("x")
    (folder / "l.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match="not inside the model's folder"):
        repository.read_folder(str(folder))


def test_a_symlinked_repository_and_model(tmp_path) -> None:
    real = make(tmp_path / "real", "a", label='label_filename: "l.txt"')
    (real / "l.txt").write_text("x\ny\n")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "b").symlink_to(real)
    assert set(repository.scan([str(tmp_path / "link")]).models) == {"a"}
    assert repository.scan([str(tmp_path / "models")]).models["b"].specs[0].name == "b"


def test_unreadable_folder_is_a_failure() -> None:
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        make(Path(root), "a").chmod(0)
        with as_user(OTHER_UID) if os.geteuid() == 0 else contextlib.nullcontext():
            found = repository.scan([root])
    assert "cannot be read" in found.failures["a"]


def test_missing_repository_is_an_error() -> None:
    with pytest.raises(ConfigError, match="model_repository: '/no/such' is not a readable folder"):
        repository.scan(["/no/such"])


@pytest.mark.parametrize("name", ["absent", "..", "../a", "a/1", "", ".git", "a\0b"])
def test_find_refuses_what_is_no_model(tmp_path, name: str) -> None:
    make(tmp_path, "a")
    with pytest.raises(NotFound):
        repository.find([str(tmp_path)], name)


def test_find_with_a_configuration_of_its_own(tmp_path) -> None:
    make(tmp_path, "a")
    assert repository.find([str(tmp_path)], "a").config.max_batch_size == 0
    override = '{"backend": "python", "max_batch_size": 4}'
    assert repository.find([str(tmp_path)], "a", override).config.max_batch_size == 4


def in_catalog(root: Path, **models: dict[str, str]) -> str:
    """Write a catalog with the given entries into a cache, and return the path."""
    (root / "repositories").mkdir(parents=True)
    path = root / "repositories" / "x.catalog"
    path.write_text(json.dumps({"url": "s3://b/m", "models": models}))
    return str(path)


def test_a_catalog_is_a_repository(tmp_path) -> None:
    make(tmp_path / "cache/snapshots/d1", "a")
    path = in_catalog(
        tmp_path / "cache",
        a={"snapshot": "d1", "problem": "the newest is bad"},
        b={"problem": "file 'x' is too long"},
        c={},
        evicted={"snapshot": "d2"},
    )
    make(tmp_path / "local", "l")
    paths = [path, str(tmp_path / "local")]
    found = repository.scan(paths)
    assert set(found.models) == {"a", "l"}
    not_fetched = "it has not been fetched"
    assert found.failures == {"b": "file 'x' is too long", "c": not_fetched, "evicted": not_fetched}
    assert found.models["a"].directory == str(tmp_path / "cache/snapshots/d1/a")
    assert repository.names(paths) == ["a", "b", "c", "evicted", "l"]
    assert repository.survey(paths).keys() == {"a", "b", "c", "evicted", "l"}
    with pytest.raises(ConfigError, match="too long"):
        repository.find(paths, "b")
    assert repository.pending(paths, ["*"])
    assert repository.pending(paths, ["c"])
    assert not repository.pending(paths, ["a", "l", "unknown"])


@pytest.mark.parametrize("content", [None, "", "[]", "{"])
def test_without_a_catalog_everything_is_to_come(content: str | None, tmp_path) -> None:
    path = tmp_path / "x.catalog"
    if content is not None:
        path.write_text(content)
    assert repository.pending([str(path)], [])
    assert repository.scan([str(path)]).models == {}
