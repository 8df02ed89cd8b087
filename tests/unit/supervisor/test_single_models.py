"""One model's folder in place of a repository, as orchestrators mount it."""

import shutil
from pathlib import Path

import pytest

from shmserve import model_places, repository, single_models
from shmserve.config import Settings
from shmserve.errors import ConfigError

CONFIG = """
backend: "python"
input [ { name: "A" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "B" data_type: TYPE_FP32 dims: [ 2 ] label_filename: "labels.txt" } ]
"""


def make(folder: Path, *versions: str) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.pbtxt").write_text(CONFIG)
    (folder / "labels.txt").write_text("no\nyes\n")
    for version in versions:
        (folder / version).mkdir()
    for place in versions or (".",):
        (folder / place / "model.py").write_text("")
    return folder


def scanned(tmp_path: Path, *entries: str) -> repository.ScanResult:
    (tmp_path / "run").mkdir(exist_ok=True)
    settings = Settings(model_repository=entries, run_dir=str(tmp_path / "run"))
    single_models.lay_out(settings)
    return repository.scan(model_places.repository_paths(settings))


@pytest.mark.parametrize(("versions", "served"), [((), "1"), (("2", "7"), "7")])
def test_with_and_without_versions(versions: tuple[str, ...], served: str, tmp_path) -> None:
    path = make(tmp_path / "mnt/models", *versions)
    found = scanned(tmp_path, f"digits={path}")
    assert found.failures == {}
    (spec,) = found.models["digits"].specs
    assert spec.version == served
    assert spec.outputs[0].labels == ("no", "yes")


def test_a_configuration_beside_a_file_is_told(tmp_path, caplog) -> None:
    for name in ("config.pbtxt", "one.py", "alone/two.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    scanned(tmp_path, f"one={tmp_path}/one.py", f"two={tmp_path}/alone/two.py")
    assert caplog.messages == [
        "config.pbtxt beside one.py is not read: make a folder with model.py and config.pbtxt,"
        " and serve that"
    ]


def test_beside_others(tmp_path) -> None:
    make(tmp_path / "repository/other", "1")
    one, two = make(tmp_path / "one"), make(tmp_path / "two", "1")
    found = scanned(tmp_path, f"a={one}", str(tmp_path / "repository"), f"b={two}")
    assert set(found.models) == {"a", "b", "other"}
    assert set(scanned(tmp_path, f"b={one}").models) == {"b"}


def test_what_cannot_be(tmp_path) -> None:
    path = make(tmp_path / "one")
    with pytest.raises(ConfigError, match="'a=' is there twice"):
        scanned(tmp_path, f"a={path}", f"a={path}")
    with pytest.raises(
        ConfigError, match=r"is not a readable folder or Python file \(No such file"
    ):
        scanned(tmp_path, "a=/no/such")


def test_a_path_with_the_sign_is_a_path() -> None:
    assert model_places.single_of("/srv/a=b") is None
    assert model_places.single_of("a/b=c") is None
    assert model_places.single_of("a=/srv/b=c") == ("a", "/srv/b=c")


def test_to_look_it_over_nothing_of_a_service_is_touched(tmp_path) -> None:
    path = make(tmp_path / "one")
    settings = Settings(model_repository=(f"a={path}",), run_dir=str(tmp_path / "run"))
    with single_models.laid_out_elsewhere(settings) as apart:
        (place,) = model_places.repository_paths(apart)
        assert set(repository.scan([place]).models) == {"a"}
    assert not Path(place).exists()
    assert not (tmp_path / "run").exists()


def test_changed_texts_are_copied_again(tmp_path) -> None:
    path = make(tmp_path / "one")
    scanned(tmp_path, f"a={path}")
    place, run_dir = tmp_path / "run/single/a", str(tmp_path / "run")
    mark = repository.fingerprint(str(place))
    single_models.refresh(run_dir)
    assert repository.fingerprint(str(place)) == mark
    (path / "config.pbtxt").write_text("max_batch_size: 4")
    (path / "config.pbtxt").chmod(0o444)
    (path / "labels.txt").unlink()
    (path / "more.txt").write_text("more")
    single_models.refresh(run_dir)
    assert {p.name: p.read_text() for p in place.glob("*t*xt")} == {
        "config.pbtxt": "max_batch_size: 4",
        "more.txt": "more",
    }
    mark = repository.fingerprint(str(place))
    single_models.refresh(run_dir)
    assert repository.fingerprint(str(place)) == mark
    single_models.refresh(str(tmp_path / "nothing"))


def test_a_model_gets_and_loses_version_folders(tmp_path) -> None:
    path = make(tmp_path / "one")
    scanned(tmp_path, f"a={path}")
    place, run_dir = tmp_path / "run/single/a", tmp_path / "run"
    marks = [repository.fingerprint(str(place))]
    (path / "1").mkdir()
    (path / "model.py").rename(path / "1/model.py")
    single_models.refresh(str(run_dir))
    assert (place / "1/model.py").is_file()
    marks.append(repository.fingerprint(str(place)))
    (path / "1/model.py").rename(path / "model.py")
    (path / "1").rmdir()
    single_models.refresh(str(run_dir))
    assert (place / "1/model.py").is_file()
    assert marks[0] != marks[1] != repository.fingerprint(str(place))
    assert [p.name for p in run_dir.iterdir()] == ["single"]
    assert (path / "model.py").is_file()


def test_a_text_that_cannot_be_read_keeps_no_other_back(tmp_path, monkeypatch, caplog) -> None:
    path = make(tmp_path / "one")
    scanned(tmp_path, f"a={path}")
    copyfile = shutil.copyfile

    def refuse_labels(source: str, target: str) -> str:
        if source.endswith("labels.txt"):
            raise PermissionError(13, "Permission denied", source)
        return copyfile(source, target)

    monkeypatch.setattr(shutil, "copyfile", refuse_labels)
    for name in ("a.txt", "config.pbtxt", "labels.txt", "z.txt"):
        (path / name).write_text("changed")
    single_models.refresh(str(tmp_path / "run"))
    single_models.refresh(str(tmp_path / "run"))
    place = tmp_path / "run/single/a"
    texts = {p.name: p.read_text() for p in place.glob("*t*xt")}
    assert texts.pop("labels.txt") == "no\nyes\n"
    assert texts == dict.fromkeys(("a.txt", "config.pbtxt", "z.txt"), "changed")
    assert [r.shmserve_fields["reason"] for r in caplog.records] == ["Permission denied"]


def test_a_model_of_one_file(tmp_path) -> None:
    file = tmp_path / "src/double.py"
    file.parent.mkdir()
    file.write_text("x = 1")
    (file.parent / "other.py").touch()
    found = scanned(tmp_path, f"d={file}")
    assert found.failures == {}
    (spec,) = found.models["d"].specs
    assert (spec.version, spec.backend, spec.inputs) == ("1", "python", ())
    place, run_dir = tmp_path / "run/single/d", str(tmp_path / "run")
    assert model_places.source_of(str(place)) == str(file)
    assert model_places.source_of(str(file.parent)) == ""
    mark = repository.fingerprint(str(place))
    single_models.refresh(run_dir)
    (file.parent / "other.py").write_text("y = 2")
    assert repository.fingerprint(str(place)) == mark
    file.write_text("x = 22")
    assert repository.fingerprint(str(place)) != mark
    settings = Settings(model_repository=(f"d={file}", f"e={file}x", str(file)))
    assert len(list(model_places.missing_folders(settings))) == 2
