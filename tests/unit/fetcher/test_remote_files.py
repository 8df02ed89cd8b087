"""A store's list of files is untrusted input."""

import json

import pytest

from shmserve.errors import ConfigError
from shmserve.fetcher import remote_files
from shmserve.fetcher.remote_files import RemoteFile, files_fault, models


def listed(*paths: str, size: int = 1) -> list[tuple[str, RemoteFile]]:
    return [(path, RemoteFile("", size, "md5:x", path)) for path in paths]


def test_models_are_the_folders_and_nothing_else() -> None:
    found = models(
        listed("readme", "a/config.pbtxt", "a/1/model.py", "b/1/x", ".git/1/x", "__pycache__/1/x")
    )
    assert set(found) == {"a", "b"}
    assert [file.path for file in found["a"].files] == ["config.pbtxt", "1/model.py"]
    assert [file.key for file in found["a"].files] == ["a/config.pbtxt", "a/1/model.py"]


def test_bytecode_of_python_is_left_out() -> None:
    (model,) = models(listed("a/1/model.py", "a/1/__pycache__/model.pyc")).values()
    assert [file.path for file in model.files] == ["1/model.py"]


def test_markers_of_folders_count_where_nothing_else_is() -> None:
    (model,) = models(listed("a/", "a/1/", "a/1/model.py", "a/2/", "a/2/")).values()
    assert sorted(file.path for file in model.files) == ["1/model.py", "2/"]


@pytest.mark.parametrize(
    "path",
    ["../x", "1/../../x", "/etc/passwd", "1//x", "./x", "1/.", "a\\b", "a\nb", "a\0b",
     "x" * 256, "/".join("abcdefghijklmnopq"), "d" * 200 + "/" + "e" * 200 + "/" + "f" * 700],
)  # fmt: skip
def test_paths_that_lead_elsewhere_are_refused(path: str) -> None:
    model = models(listed(f"bad/{path}"))["bad"]
    assert model.files == ()
    assert model.problem.startswith("file '")
    assert "\n" not in model.problem


def test_the_others_of_a_repository_are_not_concerned() -> None:
    assert models(listed("good/1/model.py", "bad/../x"))["good"].problem == ""


@pytest.mark.parametrize("name", ["a b", "..", "a\u202eb", "x" * 300])
def test_a_model_needs_a_name(name: str) -> None:
    found = models(listed(f"{name}/1/model.py"))
    assert all(model.problem for model in found.values())


def test_a_file_cannot_be_a_folder_and_none_is_there_twice() -> None:
    twice = [RemoteFile("1/x", 1, ""), RemoteFile("1/x", 1, "")]
    assert files_fault(twice) == "file '1/x' is there twice"
    both = [RemoteFile("1", 1, ""), RemoteFile("1/x", 1, "")]
    assert files_fault(both) == "'1' is both a file and a folder"


def test_numbers_are_bounded() -> None:
    many = (RemoteFile(f"f{n}", 1, "") for n in range(remote_files.MOST_FILES + 1))
    assert files_fault(many) == "it has more than 10000 files"
    assert files_fault([RemoteFile("x", -1, "")]) == "file 'x' has no size"
    with pytest.raises(ConfigError, match="more than 1024 models"):
        models(listed(*(f"m{n}/x" for n in range(remote_files.MOST_MODELS + 1))))


def test_a_digest_is_of_all_that_a_model_is() -> None:
    digests = {
        models([(path, RemoteFile("", size, mark))])[name].digest(url)
        for url in ("s3://a", "s3://b")
        for name in ("m", "n")
        for path in (f"{name}/x", f"{name}/y")
        for size in (1, 2)
        for mark in ("md5:a", "md5:b")
    }
    assert len(digests) == 32


def index(version: int = 1, sha256: str = "ab") -> bytes:
    files = {"1/model.py": {"size": 3, "sha256": sha256}, "2/": {"size": 0, "sha256": ""}}
    return json.dumps({"version": version, "models": {"m": files}}).encode()


def test_an_index_stands_for_a_listing() -> None:
    (model,) = models(remote_files.from_index(index())).values()
    assert set(model.files) == {
        RemoteFile("1/model.py", 3, "sha256:ab", "m/1/model.py"),
        RemoteFile("2/", 0, "sha256:", "m/2/"),
    }


@pytest.mark.parametrize("data", [b"", b"<html>", b"[]", b'{"version": 1}', index(2)])
def test_what_is_no_index_is_told(data: bytes) -> None:
    with pytest.raises(ConfigError, match=r"^index\.json "):
        remote_files.from_index(data)
