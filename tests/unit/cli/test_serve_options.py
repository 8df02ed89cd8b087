"""Options of `shmserve serve`, beside settings of the environment and a file."""

import os
import re
from pathlib import Path

import pytest

from shmserve import command_line, config
from shmserve.cli.serving import serve_options
from shmserve.errors import ConfigError
from shmserve.supervisor.generations import keeper


def taken(words: str, environ: dict[str, str] | None = None) -> tuple[config.Settings, list[str]]:
    environ = {} if environ is None else environ
    sentences = serve_options.take(
        command_line.parser().parse_args(["serve", *words.split()]), environ
    )
    return config.load(environ), sentences


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "models/m"
    (folder / "1").mkdir(parents=True)
    (folder / "1/model.py").touch()
    return folder


def test_a_repository_or_a_models_own_folder(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert taken(str(model.parent))[0].model_repository == (str(model.parent),)
    assert taken(str(model))[0].model_repository == (f"m={model}",)
    monkeypatch.chdir(model)
    assert taken(".")[0].model_repository == (f"m={model}",)
    assert taken(".")[1] == [f"serving model m from {model}"]
    assert taken("other=.")[0].model_repository == (f"other={model}",)
    assert taken("s3://bucket/models")[0].model_repository == ("s3://bucket/models",)


def test_a_python_file(model: Path) -> None:
    file = model / "1/model.py"
    settings, sentences = taken(str(file))
    assert settings.model_repository == (f"model={file}",)
    assert sentences == [f"serving model model from {file}"]
    assert taken(f"other={file}")[0].model_repository == (f"other={file}",)
    other = file.rename(file.with_name("1.txt"))
    with pytest.raises(ConfigError, match="is no folder and no Python file"):
        taken(str(other))
    with pytest.raises(ConfigError, match="'a%b' cannot be the name of a model"):
        taken(str(other.rename(other.with_name("a%b.py"))))


def test_several_paths(model: Path) -> None:
    one, other = model / "1/model.py", model / "1/other.py"
    other.touch()
    settings, sentences = taken(f"first={one} {other} {model.parent} --reload")
    assert settings.model_repository == (f"first={one}", f"other={other}", str(model.parent))
    assert sentences == [f"serving model first from {one}", f"serving model other from {other}"]


@pytest.mark.parametrize(
    "words",
    [
        "serve --reload a.py b.py c.py",
        "serve a.py --reload b.py --http :1 c.py",
        "serve a.py b.py --grpc :1 c.py -- --workers 2",
        "check a.py --load b.py c.py",
    ],
)
def test_paths_may_stand_behind_options(words: str) -> None:
    arguments = command_line.parser().parse_args(words.split())
    assert arguments.paths == ["a.py", "b.py", "c.py"]


@pytest.mark.parametrize("command", ["serve", "check"])
def test_unknown_options_are_no_paths(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command_line.parser().parse_args([command, "a.py", "--no-such", "b.py"])
    assert "--no-such" in capsys.readouterr().err


def test_a_folder_of_files_says_how_to_serve_them(tmp_path: Path) -> None:
    for name in ("predict.py", "upload.py", "README.md", "__pycache__/predict.pyc"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    text = (
        f"PATH: '{tmp_path}' has no folder of a model: predict.py, upload.py lie there: serve one"
        " with `shmserve serve predict.py`, several with `shmserve serve ONE.py OTHER.py`, or with"
        ' model_repository = ["predict=predict.py", …]'
    )
    with pytest.raises(ConfigError, match=re.escape(text)):
        taken(str(tmp_path))
    (tmp_path / "later").mkdir()
    assert taken(str(tmp_path))[0].model_repository == (str(tmp_path),)


@pytest.mark.parametrize("stray", ["old.onnx", "weights.pt", "model.py"])
def test_a_repository_with_a_stray_file_stays_a_repository(model: Path, stray: str) -> None:
    (model.parent / stray).touch()
    settings, sentences = taken(str(model.parent))
    assert (settings.model_repository, sentences) == ((str(model.parent),), [])
    (model / "1/model.py").unlink()
    (model / "1").rmdir()
    assert taken(str(model.parent))[1] == [f"serving model models from {model.parent}"]


def test_a_models_own_folder_may_hold_folders_that_look_like_models(model: Path) -> None:
    (model / "parts/1").mkdir(parents=True)
    assert taken(str(model))[1] == [f"serving model m from {model}"]


def test_a_version_is_no_model(model: Path) -> None:
    text = f"looks like a model's version: name the folder above it ({model})"
    with pytest.raises(ConfigError, match=re.escape(text)):
        taken(f"{model}/1/")
    assert taken(f"m={model}/1")[0].model_repository == (f"m={model}/1",)


def test_without_a_host_an_address_is_of_this_host() -> None:
    settings, _ = taken("--http :8080,unix:/run/h.sock --grpc 0.0.0.0:8081")
    assert settings.http_bind == ("127.0.0.1:8080", "unix:/run/h.sock")
    assert settings.grpc_bind == ("0.0.0.0:8081",)
    assert settings.model_control == "none"


def test_without_options_nothing_changes() -> None:
    environ = {"SHMSERVE_HTTP_BIND": "127.0.0.1:9000"}
    assert taken("-- --threads 2", environ)[1] == []
    assert environ == {"SHMSERVE_HTTP_BIND": "127.0.0.1:9000"}


def test_options_win_and_say_so(tmp_path: Path) -> None:
    file = tmp_path / "shmserve.toml"
    file.write_text('model_control = "explicit"\npoll_interval_s = 0.3\n')
    environ = {"SHMSERVE_CONFIG": str(file), "SHMSERVE_HTTP_BIND": "127.0.0.1:9000"}
    settings, sentences = taken("--http :8080 --grpc :8081 --reload", environ)
    assert (settings.model_control, settings.poll_interval_s) == ("poll", 0.3)
    assert settings.http_bind == ("127.0.0.1:8080",)
    assert sentences == [
        "--http replaces http_bind = 127.0.0.1:9000 (SHMSERVE_HTTP_BIND in the environment)",
        f"--reload replaces model_control = explicit ({file}, line 1)",
    ]
    assert taken("--http :8080 --reload", environ)[1] == [], "a handover runs the command again"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("/no/such", "PATH: '/no/such' is no folder and no Python file"),
        ("s3://bucket/models --reload", "--reload: looks at files of this host, and s3://bucket/"),
        ("--http 8080", "--http: '8080' is no HOST:PORT and no unix:PATH"),
        ("--grpc :99999", "--grpc: '127.0.0.1:99999' is no HOST:PORT"),
        ("--http :8001", "(127.0.0.1:8001) and gRPC (127.0.0.1:8001) would have the same"),
        (
            "--http :8080 --grpc 0.0.0.0:8080",
            "--grpc and --http: HTTP (127.0.0.1:8080) and gRPC (0.0.",
        ),
        ("--http 0.0.0.0:08001", "--http: HTTP (0.0.0.0:08001) and gRPC (127.0.0.1:8001) "),
        ("--http :1 -- --bind :9000", "--http and gunicorn's --bind, also in GUNICORN_CMD_ARGS,"),
        ("--http :1 -- -w 1 --bin=:9000", "--http and gunicorn's --bind, "),
        ("--http :1 -- -b:9000", "--http and gunicorn's --bind, "),
    ],
)
def test_what_cannot_be(words: str, error: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(error)):
        taken(words)


def test_addresses_that_can_be_together() -> None:
    taken("--http :0 --grpc :0")
    taken("--http 0.0.0.0:8080 --grpc [::1]:8080 -- --backlog 9")
    taken("--http :8001", {"SHMSERVE_GRPC_PROCESSES": "0"})
    taken("--grpc :8001", {"SHMSERVE_HTTP_BIND": "fd://3"})


def test_gunicorns_variable_must_not_bind_either() -> None:
    environ = {"GUNICORN_CMD_ARGS": "--workers 2 --bind :9000"}
    with pytest.raises(ConfigError, match="--http and gunicorn's --bind, also in GUNICORN_CMD_"):
        taken("--http :8080", environ)
    taken("--grpc :8081", environ)


def test_folders_that_cannot_be(model: Path) -> None:
    unnamed = model.rename(model.with_name("a b"))
    arguments = command_line.parser().parse_args(["serve", str(unnamed)])
    with pytest.raises(ConfigError, match="'a b' cannot be the name of a model"):
        serve_options.take(arguments, {})
    comma = unnamed.rename(unnamed.with_name("a,b"))
    with pytest.raises(ConfigError, match="has a comma"):
        taken(str(comma))


def test_addresses_are_not_for_sockets_of_systemd() -> None:
    environ = {"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "1"}
    with pytest.raises(ConfigError, match="--http: systemd passes this service's sockets"):
        taken("--http :8080", environ)
    taken("--grpc :8081", environ)
    others = {**environ, "LISTEN_FDS": "2", "LISTEN_FDNAMES": "region-a:grpc"}
    taken("--http :8080", others)
    with pytest.raises(ConfigError, match="--grpc: systemd passes this service's sockets for grpc"):
        taken("--grpc :8081", others)
    taken("--http :8001", {**environ, "LISTEN_FDNAMES": "grpc"})  # nothing listens at grpc_bind
    taken("--http :8080", {**environ, keeper.VARIABLE: "3"})


def test_options_of_gunicorn_stand_behind_the_dashes(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "--config",
        "f",
        "serve",
        "models",
        "--reload",
        "--",
        "--workers",
        "4",
        "--",
        "--reload",
    ]
    arguments = command_line.parser().parse_args(words)
    assert (arguments.config, arguments.paths, arguments.reload) == ("f", ["models"], True)
    assert arguments.gunicorn == ["--workers", "4", "--", "--reload"]
    assert command_line.parser().parse_args(["serve", "--", "-w", "4"]).paths == []
    with pytest.raises(SystemExit):
        command_line.parser().parse_args(["serve", "--workers", "4"])
    assert "put gunicorn's options after --" in capsys.readouterr().err
