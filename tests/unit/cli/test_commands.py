"""Commands that need no server, and the messages of other commands without a server."""

from __future__ import annotations

import io
import os
import runpy
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest

import shmserve
from shmserve import cli, config
from shmserve.cli.inspecting import try_load
from shmserve.cli.operating import server_address, top
from shmserve.cli.serving import init
from shmserve.client.wire import credentials
from shmserve.config import Settings
from shmserve.errors import ConfigError
from shmserve.observe.usage import Usage
from tests.running_server import WATCHDOG_S

ROOT = Path(__file__).parents[3]


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """Settings of a server that does not run."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("SHMSERVE_HTTP_BIND", f"127.0.0.1:{unused.getsockname()[1]}")
        monkeypatch.setenv("SHMSERVE_RUN_DIR", str(tmp_path / "run"))
        yield  # nobody else gets the port meanwhile


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the single line with which a command must end, with status 2."""
    try:
        status = cli.main(words)
    except SystemExit as ex:
        status = ex.code  # type: ignore[assignment]
    assert status == 2
    text = capsys.readouterr().err
    assert text.startswith("shmserve: ")
    assert text.count("\n") == 1
    return text


def test_the_package_is_a_program_that_tells_its_version(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["shmserve", "--version"])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("shmserve", run_name="__main__")
    assert capsys.readouterr().out == f"shmserve {shmserve.__version__}\n"


def test_a_source_tree_in_the_working_directory_runs_whatever_is_installed(tmp_path) -> None:
    (tmp_path / "shmserve").symlink_to(ROOT / "shmserve")
    told = tmp_path / "told"
    (tmp_path / "m.py").write_text(
        f"import pathlib, shmserve\npathlib.Path({str(told)!r}).write_text(shmserve.__file__)\n"
        "def f(x: int) -> int: return x\n"
    )
    environ = os.environ | {"SHMSERVE_RUN_DIR": str(tmp_path / "run")}
    command = [sys.executable, "-m", "shmserve", "check", "--load", "m.py"]
    subprocess.run(command, cwd=tmp_path, env=environ, check=True, timeout=WATCHDOG_S)
    assert told.read_text() == str(tmp_path / "shmserve/__init__.py")


@pytest.mark.parametrize("options", [[], ["-P"]])
def test_a_reload_imports_from_where_the_start_did(options: list[str]) -> None:
    program = (
        "import sys; from shmserve.cli.serving import serve;"
        " sys.argv = ['/x/__main__.py', 'serve']; print(*serve._called())"
    )
    done = subprocess.run(
        [sys.executable, *options, "-c", program],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": ""},
        capture_output=True,
        text=True,
        check=True,
        timeout=WATCHDOG_S,
    )
    assert done.stdout.split() == [sys.executable, *options, "-m", "shmserve", "serve"]


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["shwo"], "invalid choice: 'shwo'"),
        (["show", "nothing"], "invalid choice: 'nothing'"),
        (["load"], "required: MODEL"),
        (["load", "m", "--url", "ftp://x"], "--url: a server's address is"),
        (["load", "m", "--key-file", "/none"], "--key-file: cannot be read: /none: No such file"),
        (["measure", "m", "--key", "a b"], "--key: a key is one word"),
        (["load", "m", "--url", "https://a", "--ca", "/none"], "--ca: /none cannot be read: No"),
        (["load", "m", "--url", "https://a", "--cert", "/"], "--cert: / "),
        (["load", "m", "--url", "http://a", "--ca", "/none"], "--ca: needs an address https://"),
        (["load", "m", "--url", "http://127.0.0.1:1"], "from the server at http://127.0.0.1:1: "),
        (["load", "m", "--url", "unix:/no/sock"], "from the server at unix:/no/sock: [Errno 2]"),
        (["unload", "m"], "no answer from the server"),
        (["measure", "m"], "no answer from the server"),
        (["measure", "m", "--seconds", "0"], "--seconds: must be more than 0 and at most 3600"),
        (["show", "top"], "no server answers in the run directory"),
        (["show", "top", "--interval", "0"], "--interval: must be between"),
        (["ready", "--wait", "-1"], "--wait: must be"),
        (["init", "/"], "/ is not empty"),
        (["show", "events", "--limit", "-1"], "--limit: must be 0 or more, not -1"),
        (["units", "x", "--app", "/nowhere"], "there is no program /nowhere/bin/shmserve"),
        (["--config", "/none", "check"], "SHMSERVE_CONFIG, /none, cannot be read"),
    ],
)
def test_errors_are_one_line_that_names_what_was_wrong(nowhere, monkeypatch, capsys, words, what):
    monkeypatch.setenv("SHMSERVE_CONFIG", "")  # set, so that monkeypatch restores the variable
    assert what in told(capsys, *words)


def test_a_key_in_the_environment_is_no_setting() -> None:
    assert config.KEY_VARIABLE == credentials.KEY_VARIABLE
    config.load({config.KEY_VARIABLE: "x"})


def test_ready_says_no(nowhere: None, capsys) -> None:
    assert cli.main(["ready", "m"]) == 1
    assert capsys.readouterr().out.startswith("m is not ready: no answer from the server")


@pytest.mark.parametrize(
    ("statuses", "status"), [([404, 503, 200], 0), ([404, 401, 200], 1), ([403, 200], 1)]
)
def test_ready_waits_for_a_model_that_is_not_known_yet(statuses: list[int], status: int) -> None:
    left = list(statuses)

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(left.pop(0))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        assert cli.main(["ready", "m", "--wait", "60", "--url", url]) == status
        server.shutdown()
        thread.join()
    assert len(left) == (0 if status == 0 else 1)


def test_settings_are_shown_with_where_they_are_from(monkeypatch, capsys) -> None:
    monkeypatch.setenv("SHMSERVE_POOL_BYTES", "1024k")
    monkeypatch.setenv("SHMSERVE_HTTP_RESTRICTED_API", "health:x=hush")
    assert cli.main(["settings", "--json"]) == 0
    text = capsys.readouterr().out
    rows = {row["setting"]: row for row in msgspec.json.decode(text)}
    assert rows.keys() == config.declared().keys()
    assert rows["pool_bytes"]["value"] == "1MiB"
    assert rows["pool_bytes"]["from"] == "SHMSERVE_POOL_BYTES in the environment"
    assert rows["http_workers"]["from"] == "default"
    assert "hush" not in text


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completions_know_the_commands(capsys, shell: str) -> None:
    assert cli.main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "measure" in script
    assert "processes" in script


@pytest.mark.parametrize(
    ("module", "words"), [("shtab", ["completion", "bash"]), ("rich.console", ["show", "top"])]
)
def test_without_a_library_the_extra_is_named(nowhere, monkeypatch, capsys, module, words) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    assert "pip install 'shmserve[cli]'" in told(capsys, *words)


def test_settings_are_explained_by_name(capsys) -> None:
    assert cli.main(["settings", "http_workers", "max_chunks"]) == 0
    assert capsys.readouterr().out == (
        "http_workers\n  number of HTTP worker processes\n"
        "  takes a whole number, at least 1; default: 2\n"
        "\nmax_chunks\n  since 0.2 it is always 65536, as no service needed another value; "
        "delete the setting\n"
    )
    assert cli.main(["settings", "http_wrkers"]) == 2
    told = capsys.readouterr().err
    assert "there is no setting http_wrkers; did you mean http_workers?" in told
    assert cli.main(["settings", "qqq"]) == 2
    assert "there is no setting qqq: `shmserve settings` shows all" in capsys.readouterr().err


def test_check_lists_all_that_an_upgrade_takes_away(monkeypatch, capsys) -> None:
    monkeypatch.setenv("SHMSERVE_MAX_KEYS", "1024")
    monkeypatch.setenv("SHMSERVE_MAX_FIELDS", "7")
    monkeypatch.setenv("SHMSERVE_GRPC_SERVER", "grpcio")
    assert cli.main(["check"]) == 2
    told = capsys.readouterr().err
    assert "max_fields = '7'" in told
    assert "grpc_server = 'grpcio'" in told
    assert "max_keys (SHMSERVE_MAX_KEYS in the environment) has no effect" in told


def test_a_repository_with_examples_is_made_and_can_be_checked(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("SHMSERVE_CONFIG", "")
    folder = tmp_path / 'a "b'
    assert cli.main(["init", str(folder)]) == 0
    assert "shmserve.toml serve" in capsys.readouterr().out
    assert cli.main(["--config", str(folder / "shmserve.toml"), "check"]) == 0
    out = capsys.readouterr().out
    for name in ("add_sub", "digits", "identity", "noop"):
        assert f"ok    model {name} version 1" in out
    assert not (folder / "workers/digits/training").exists()
    assert "is not empty" in told(capsys, "init", str(folder))


@pytest.mark.parametrize(
    ("requires", "finding", "status"),
    [("all", "FAIL", 1), ("any", "warn", 0), ("noop", "warn", 0), ("noop,broken", "FAIL", 1)],
)
def test_a_broken_model_matters_where_readiness_wants_it(
    nowhere: None, monkeypatch, tmp_path, capsys, requires: str, finding: str, status: int
) -> None:
    shutil.copytree(init.examples() / "noop", tmp_path / "r/noop")
    (tmp_path / "r/broken/1").mkdir(parents=True)
    monkeypatch.setenv("SHMSERVE_MODEL_REPOSITORY", str(tmp_path / "r"))
    monkeypatch.setenv("SHMSERVE_READY_REQUIRES", requires)
    assert cli.main(["check"]) == status
    assert f"{finding}  model broken: " in capsys.readouterr().out
    shutil.rmtree(tmp_path / "r/noop")
    assert cli.main(["check"]) == 1, "nothing is left that could be served"


def test_where_a_server_is_found() -> None:
    def url(*binds: str, **more: Any) -> str:
        return server_address.http(Settings(http_bind=binds, **more), None)

    assert url("0.0.0.0:80", "unix:/x") == "unix:/x"
    assert url("0.0.0.0:80") == "http://127.0.0.1:80"
    assert url("[::]:80", "b:1") == "http://[::1]:80"
    assert server_address.http(Settings(), "http://a:1") == "http://a:1"
    assert url("a:1", http_tls_cert="x") == "https://a:1"
    with pytest.raises(ConfigError, match="give --url"):
        url("fd://3")
    tls = Settings(grpc_bind=("a:1",), grpc_tls_cert="x")
    assert server_address.grpc(Settings(grpc_bind=("a:1",)), None) == ("a:1", False)
    assert server_address.grpc(tls, None) == ("a:1", True)
    assert server_address.grpc(tls, "b:1") == ("b:1", False)
    assert server_address.grpc(tls, "grpcs://b:1") == ("b:1", True)
    with pytest.raises(ConfigError, match="no gRPC"):
        server_address.grpc(Settings(grpc_processes=0), None)


def test_code_that_is_no_python_is_found_with_its_place(tmp_path) -> None:
    (tmp_path / "model.py").write_text("import nothing_here\n")
    assert try_load.code_problem(tmp_path) == ""
    (tmp_path / "model.py").write_text("x = 1\ndef f(:\n")
    assert try_load.code_problem(tmp_path).startswith(f"{tmp_path}/model.py, line 2: ")


def test_the_line_of_the_model_that_failed_is_found_behind_other_errors(tmp_path) -> None:
    path = tmp_path / "model.py"
    path.write_text("def load():\n    return 1 / 0\n")
    names: dict[str, Callable[[], None]] = {}
    exec(compile(path.read_text(), str(path), "exec"), names)
    with pytest.raises(ZeroDivisionError) as told:
        names["load"]()
    outer = ConfigError("told otherwise")
    outer.__cause__ = told.value
    assert try_load._place(outer, (str(tmp_path),)) == f"{path}, line 2: "
    assert try_load._place(outer, ("/elsewhere",)) == ""


def test_the_live_view_shows_rates() -> None:
    from rich.console import Console

    process = {"role": "http", "process": "http-1", "pid": 7, "up_s": 3.0, "held_bytes": 1 << 20}
    other = {**process, "process": "coordinator-24273-fe60", "role": "coordinator", "pid": 4194303}
    model = {"model": "m", "version": "1", "state": "READY", "instance": "m/1/0"}
    stats = {"model": "m", "version": "1", "failed": 2, "request_ms": 0.5}

    def look(at: float, answered: int, cpu: float) -> top.Look:
        tables: dict[str, Any] = {
            "processes": [{**process, "instance": "m/1/0"}, {**other, "up_s": 98765.0}, process],
            "models": [{**model, "instance_state": "READY"}],
            "queues": [{"process": "http-1", "instance": "m/1/0", "in_flight": 3}],
            "stats": [{**stats, "answered": answered}],
        }
        return top.Look(at, tables, {7: Usage(cpu, 0, 5 << 20, 0, True)})

    drawn = io.StringIO()
    Console(file=drawn, width=120).print(top.frame(look(0, 10, 1.0), look(2, 110, 2.0)))
    lines = [" ".join(line.split()) for line in drawn.getvalue().splitlines()]
    assert lines[1] == "m 1 READY 1 of 1 3 50.0 2 0.500"
    assert lines[-3].startswith("m/1/0 http 7 ")
    assert lines[-1] == "http-1 http 7 50.0 5 1 3"

    narrow = io.StringIO()
    Console(file=narrow, width=80).print(top.frame(look(0, 10, 1.0), look(2, 110, 2.0)))
    line = narrow.getvalue().splitlines()[-2].split()
    assert (line[0].endswith("…"), line[1:]) == (True, ["coordinator", "4194303", "1", "98765"])


def test_the_programs_of_the_cli_start_quickly_without_what_they_do_not_need() -> None:
    code = (
        "import sys; from shmserve import command_line; command_line.parser()\n"
        "heavy = {'numpy', 'grpc', 'rich', 'shtab', 'falcon'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, cwd=ROOT)
