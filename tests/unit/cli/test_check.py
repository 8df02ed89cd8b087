"""`shmserve check` of folders without models, and of models not loaded at the start."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shmserve import cli
from tests.environments import environment, fake_python, pack
from tests.model_files import X_TO_Y, model_maker, native
from tests.running_server import wait_until

Check = Callable[..., tuple[int, list[str]]]


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> Check:
    """Return a function that runs the command in a repository with these files, and returns its
    status and findings on the repository. `path`: repository below the folder with the files.
    `given`: paths on the command line."""

    def run(
        *files: str, path: str = "", load: bool = False, given: str = "", **settings: str
    ) -> Any:
        for file in files:
            (tmp_path / "r" / file).parent.mkdir(parents=True, exist_ok=True)
            custom = file.endswith("model-settings.json")
            (tmp_path / "r" / file).write_text('{"implementation": "a.B"}' if custom else "")
        settings = {"model_repository": str(tmp_path / "r" / path), **settings}
        for name, value in {**settings, "run_dir": str(tmp_path / "run")}.items():
            monkeypatch.setenv(f"SHMSERVE_{name.upper()}", value)
        status = cli.main(["check", *given.split(), *(["--load"] if load else [])])
        lines = capsys.readouterr().out.replace(f"{tmp_path}/", "").splitlines()
        return status, [line for line in lines if not line.startswith("ok    memory")][1:]

    (tmp_path / "r").mkdir()
    return run


NONE = "FAIL  model_repository has no model"
MLSERVER = (
    "MLServer's model-settings.json names an implementation that is not served here:"
    " write config.pbtxt and 1/model.py (docs/from_mlserver.md shows how)"
)


@pytest.mark.parametrize(
    ("files", "path", "found"),
    [
        ("a/notes.txt", "", "r/a has neither 1/model.py or 1/model.onnx or 1/model.pt or 1/model."),
        ("a/model.py", "", "r/a has model.py, but no version folder: move model.py to 1/model.py"),
        ("a/net.onnx", "", "r/a has net.onnx, but no version folder: move net.onnx to 1/model."),
        ("a/net.pt", "", "move net.pt to 1/model.pt, and write config.pbtxt"),
        ("a/model.pt2", "", "has model.pt2, but no version folder: move model.pt2 to 1/model.pt2"),
        ("a/model.pkl", "", "has model.pkl, but no version folder: move model.pkl to 1/model.pkl"),
        ("a.py b.py", "", "r has no folder of a model: a.py, b.py lie there: serve one with"),
        ("a/v01/model.py", "", "r/a its folder 'v01' is no version: rename it to '1'"),
        ("a/b/1/model.py", "", "has folders of models (b), and is none: add its path to model_"),
        ("a/model-settings.json a/model.py", "", f"r/a {MLSERVER}"),
        ("model-settings.json", "", f"MLServer's, and no folder of models: {MLSERVER}"),
        (
            "m/1/model.py",
            "m",
            "r/m is a model's own folder (it has 1/model.py), and no folder of models:"
            " write 'm=r/m' in model_repository, or name the folder above it",
        ),
        ("m/config.pbtxt m/labels.txt", "m", "r/m is a model's own folder (it has config.pbtxt)"),
    ],
)  # fmt: skip
def test_a_repository_without_models_is_an_error_that_says_what_is_there(
    check: Check, files: str, path: str, found: str
) -> None:
    status, lines = check(*files.split(), path=path)
    assert (status, lines[-1], len(lines)) == (1, NONE, 2)
    assert lines[0].startswith("warn  r")
    assert found in lines[0]


EMPTY = (
    "warn  model_repository has no model: nothing will be served until one is there"
    " (a folder with 1/model.py or alike, and config.pbtxt)"
)


@pytest.mark.parametrize("control", ["none", "explicit", "poll"])
def test_an_empty_repository_is_a_warning(check: Check, control: str) -> None:
    assert check("README.md", ".git/config", model_control=control) == (0, [EMPTY])
    status, lines = check(model_control="explicit", load_models="m")
    assert (status, lines[-1]) == (1, "FAIL  none of the models can be served")


def test_where_models_may_come_later_other_folders_are_a_warning(check: Check) -> None:
    status, lines = check("a/model.py", model_control="poll")
    assert (status, lines[1:]) == (0, [EMPTY])
    assert lines[0].startswith("warn  r/a has model.py, but no version folder")


def test_a_few_of_many_folders_are_explained(check: Check) -> None:
    status, lines = check(*[f"{number}/x" for number in range(20)])
    assert (status, len(lines)) == (1, 10)
    assert lines[-2:] == ["warn  and 12 more folders", NONE]


def test_a_folder_of_mlservers_with_a_version_is_told_what_to_do(check: Check) -> None:
    status, lines = check("m/1/weights", "m/model-settings.json")
    assert status == 1
    assert lines[0] == f"FAIL  model m: model 'm': config.pbtxt is missing [r/m]; {MLSERVER}"


def test_all_folders_are_checked_whichever_are_loaded(check: Check, tmp_path: Path) -> None:
    make = model_maker(tmp_path / "r")
    for name in ("loaded", "other"):
        make(native("return {}"), name=name)
    make("def f(:", name="wrong")
    make("", "what", name="unread")
    status, lines = check("near/model.py", model_control="explicit", load_models="loaded")
    assert status == 0
    assert lines[:3] == [
        "note  r/near has model.py, but no version folder: move model.py to 1/model.py",
        "ok    model loaded version 1: python, 1 instance",
        "ok    model other version 1: python, 1 instance, not in load_models",
    ]
    assert lines[3].startswith("warn  model wrong version 1: r/wrong/1/model.py, line 1: ")
    assert lines[3].endswith(", not in load_models")
    assert lines[4].startswith("warn  model unread: model 'unread': config.pbtxt: ")
    status, lines = check(ready_requires="other")
    assert (status, lines[-1]) == (1, "FAIL  ready_requires: 'other' is no model of load_models")


def test_a_syntax_error_in_a_model_of_one_file_names_that_file(
    check: Check, tmp_path: Path
) -> None:
    (tmp_path / "m.py").write_text("\ndef (")
    _, lines = check(given=str(tmp_path / "m.py"))
    assert "FAIL  model m version 1: m.py, line 2: invalid syntax" in lines


def test_onnx_files_are_read_without_loading_them(check: Check, tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    from tests.unit.executor.test_onnx_backend import adder
    from tests.unit.executor.test_onnx_file import classifier

    adder(tmp_path / "r/adder", ["N", 3], config="")
    classifier(tmp_path / "r/sk")
    status, lines = check()
    assert (status, lines[:2]) == (
        1,
        [
            "ok    model adder version 1: onnxruntime, 1 instance",
            "note  model adder version 1: max_batch_size is not set: a load chooses 4 if the first"
            " dimensions of all outputs are variable, as those of the inputs; max_batch_size in"
            " config.pbtxt allows other batches",
        ],
    )
    assert lines[2].startswith("FAIL  model sk version 1: model 'sk': output 'output_probability'")
    assert "Export the model with options={'zipmap': False}: the output is then a" in lines[2]


def test_operators_are_told_the_paths_that_clients_are_not(check: Check, tmp_path: Path) -> None:
    code = "class Model:\n    def __init__(self, c):\n        open('/nowhere/weights.npy')\n"
    model_maker(tmp_path / "r")(code + "    def infer(self, request): return {}\n")
    status, lines = check(load=True)
    assert (status, lines[0]) == (
        1,
        "FAIL  model m version 1: r/m/1/model.py, line 3: [Errno 2] No such file or directory:"
        " '/nowhere/weights.npy'",
    )


def test_a_models_own_folder_is_told_without_links(check: Check, tmp_path: Path) -> None:
    code = "class Model:\n    def __init__(self, c):\n        1 / 0\n"
    model_maker(tmp_path / "r")(code + "    def infer(self, request): return {}\n")
    (tmp_path / "r/m/1/model.py").rename(tmp_path / "r/m/model.py")
    (tmp_path / "r/m/1").rmdir()
    status, lines = check(load=True, model_repository=f"m={tmp_path}/r/m")
    assert (status, lines[0]) == (
        1,
        "FAIL  model m version 1: r/m/model.py, line 3: division by zero",
    )


@pytest.mark.parametrize(("method", "given"), [("setup", True), ("load", True), ("start", False)])
def test_a_method_that_nobody_calls_before_the_first_request(
    check: Check, tmp_path: Path, method: str, given: bool
) -> None:
    code = f"    def {method}(self): ...\n    def predict(self, x: int) -> int: return x\n"
    (tmp_path / "r/mine.py").write_text(f"class Mine:\n{code}")
    (tmp_path / "r/other.py").write_text(f"class Other:\n    def __init__(self): ...\n{code}")
    both = f"mine={tmp_path}/r/mine.py,other={tmp_path}/r/other.py"
    status, lines = check(load=True, model_repository=both)
    note = f"note  model mine version 1: {method} is never called here: name it __init__"
    assert (status, lines[1 : 1 + given]) == (0, [note] * given)
    assert [line for line in lines if "never called" in line] == [note] * given


def test_paths_as_of_serve(check: Check, tmp_path: Path) -> None:
    (tmp_path / "r/mine.py").write_text("def mine(x: int) -> int: return x")
    model_maker(tmp_path / "other")(native("return {}"))
    status, lines = check(given=f"{tmp_path}/r/mine.py {tmp_path}/other", load=True)
    assert (status, lines[-2:]) == (
        0,
        [
            "ok    model m version 1: python, 1 instance",
            "ok    model mine version 1: python, 1 instance",
        ],
    )


def test_only_models_of_the_start_are_loaded(check: Check, tmp_path: Path) -> None:
    make = model_maker(tmp_path / "r")
    make(native("return {}"), name="good")
    make(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + native("return {}"), name="heavy")
    status, lines = check(load=True, model_control="explicit", load_models="good")
    assert (status, lines) == (
        0,
        [
            "ok    model good version 1: python, 1 instance",
            "ok    model heavy version 1: python, 1 instance, not in load_models",
        ],
    )
    assert not (tmp_path / "ran").exists()
    check(load=True, model_control="none")
    assert (tmp_path / "ran").exists()


def test_a_missing_framework_is_told_without_loading(
    check: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "r/net"
    folder.mkdir()
    tensors = 'put [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]\n'
    (folder / "config.pbtxt").write_text(f'backend: "pytorch"\nin{tensors}out{tensors}')
    monkeypatch.setitem(sys.modules, "torch", None)
    status, lines = check("net/1/model.pt")
    needs = "backend 'pytorch' needs the extra 'torch': pip install 'shmserve[torch]'"
    assert lines[0] == f"FAIL  model net version 1: {needs}"
    assert status == 1


def test_a_model_is_loaded_in_its_own_environment(check: Check, tmp_path: Path) -> None:
    make = model_maker(tmp_path / "r")
    for name in ("own", "bare", "gone", "broken"):
        make("import contradiction\n" + native("pass"), name=name)
    environment(tmp_path / "r" / "own" / ".venv", "2")
    environment(tmp_path / "r" / "bare" / ".venv", "2", packages=False)
    fake_python(tmp_path / "r" / "gone" / ".venv", "").joinpath("bin", "python").unlink()
    fake_python(tmp_path / "r" / "broken" / ".venv", "echo no stdlib >&2\nexit 3")
    status, lines = check(load=True)
    assert status == 1
    assert "ok    model own version 1: python, 1 instance" in lines
    text = "\n".join(lines)
    assert "model 'bare': .venv cannot be used: it has no msgspec (msgspec>=0.20 is needed)" in text
    assert "model 'gone': .venv cannot be used: its interpreter bin/python, or what" in text
    broken = "its interpreter bin/python ends with status 3: no stdlib: run `shmserve env build"
    assert f"model 'broken': .venv cannot be used: {broken}" in text


def test_packs_are_unpacked_outside_of_the_services_folder(check: Check, tmp_path: Path) -> None:
    """Root's check must not make a folder closed to the service's user."""
    named = "parameters { key: 'EXECUTION_ENV_PATH' value { string_value: 'pack.tar.gz' } }"
    folder = model_maker(tmp_path / "r")(
        "import contradiction\n" + native("pass"), X_TO_Y + named, "m"
    )
    pack(Path(folder, "pack.tar.gz"), "2")
    status, lines = check(load=True, repository_cache_dir=str(tmp_path / "cache"))
    assert (status, lines) == (0, ["ok    model m version 1: python, 1 instance"])
    assert not (tmp_path / "cache").exists()


def test_requirements_that_the_server_does_not_meet_are_a_note(
    check: Check, tmp_path: Path
) -> None:
    folder = Path(model_maker(tmp_path / "r")(native("pass"), name="m"))
    (folder / "requirements.txt").write_text("no_such_package==1\n")
    status, lines = check()
    advice = "requirements.txt wants no_such_package==1, which the server does not have: run `"
    assert f"note  model m version 1: {advice}shmserve env build r/m`" in lines
    assert status == 0


def test_sigterm_ends_the_load_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "temporary").mkdir()
    model = tmp_path / "slow.py"
    model.write_text(f"""
import os, pathlib, time
pathlib.Path({str(tmp_path)!r}, "pid").write_text(str(os.getpid()))
time.sleep(600)
def double(x: int) -> int:
    return 2 * x
""")
    command = [sys.executable, "-m", "shmserve", "check", "--load", str(model)]
    environ = os.environ | {
        "TMPDIR": f"{tmp_path}/temporary",
        "SHMSERVE_RUN_DIR": f"{tmp_path}/run",
    }
    with subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL) as process:
        told = tmp_path / "pid"
        wait_until(lambda: told.exists() and told.read_text(), "the model's code does not run")
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert list((tmp_path / "temporary").iterdir()) == []
    assert not Path("/proc", told.read_text()).exists()
