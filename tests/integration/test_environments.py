"""Models that bring a Python and packages of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.environments import environment, fake_python, pack
from tests.model_files import model_maker
from tests.running_server import ROOT, RunningServer, wait_until
from tests.servers import SMALL, Server, Starting

MODEL = """
    import importlib.util
    import multiprocessing
    import os
    import sys

    import numpy as np
    import shmserve
    from contradiction import VERSION

    class Model:
        def infer(self, request):
            text = request.input("MODEL")[0].decode()
            if text:
                return request.call(text, {"MODEL": np.array([b""], object)})
            leaked = [name for name in ("PYTHONPATH", "PYTHONHOME") if name in os.environ]
            servers = [name for name in ("gunicorn", "falcon") if importlib.util.find_spec(name)]
            package = os.path.dirname(shmserve.__file__)
            process = multiprocessing.get_context("spawn").Process(target=int)
            process.start()
            process.join()
            leaked += [f"status {process.exitcode}"] if process.exitcode else []
            texts = [VERSION, sys.prefix, package, ",".join(leaked), ",".join(servers)]
            return {"TEXTS": np.array(texts, object)}
"""
CONFIG = """
    backend: "python"
    input [ { name: "MODEL" data_type: TYPE_STRING dims: [ 1 ] } ]
    output [ { name: "TEXTS" data_type: TYPE_STRING dims: [ 5 ] } ]
    instance_group [ { kind: KIND_CPU } ]
"""
NAMED = "parameters { key: 'EXECUTION_ENV_PATH' value { string_value: '%s' } }"
# Script of an old Python
OLD = f"""shift 2
exec {sys.executable} -I -c 'import runpy, sys
sys.version_info = (3, 10, 13)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")' "$@"
"""


def texts(server: RunningServer, model: str, called: str = "") -> list[str]:
    document = {
        "inputs": [{"name": "MODEL", "datatype": "BYTES", "shape": [1], "data": [called]}],
    }
    status, answer = server.infer(model, document)
    assert status == 200, answer
    return list(answer["outputs"][0]["data"])


def reason(server: RunningServer, model: str) -> str:
    """Return the reason in the index why a model is not served, or ""."""
    status, rows = server.post("/v2/repository/index", {})
    rows = rows if status == 200 else []
    return "".join(row.get("reason", "") for row in rows if row["name"] == model)


def servers_packages(folder: Path) -> dict[str, str]:
    """Return variables for a `contradiction` in the server's Python."""
    folder.mkdir()
    (folder / "contradiction.py").write_text("VERSION = '1'\n")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *os.environ.get("PYTHONPATH", "").split()])}


def test_models_whose_packages_contradict_each_other(tmp_path: Path) -> None:
    make, cache = model_maker(tmp_path / "models"), tmp_path / "cache"
    servers = Path(make(MODEL, CONFIG, "servers"))
    (servers / "requirements.txt").write_text("contradiction==9\n")
    own = environment(Path(make(MODEL, CONFIG, "own")) / ".venv", "2")
    (site,) = own.glob("lib/python*/site-packages")
    (site / "sitecustomize.py").touch()
    make(MODEL, CONFIG + NAMED % "$$TRITON_MODEL_DIRECTORY/../../pack.tar.gz", "packed")
    pack(tmp_path / "pack.tar.gz", "3")
    settings: dict[str, Any] = {
        **SMALL,
        "model_control": "explicit",
        "load_models": "*",
        "repository_cache_dir": cache,
    }
    environ = servers_packages(tmp_path / "packages")
    with Server(tmp_path / "models", environ, **settings) as server:
        package = str(ROOT / "shmserve")
        assert texts(server, "servers")[0] == "1"
        assert texts(server, "own") == ["2", str(own), package, "", ""]
        version, prefix, found, leaked, _ = texts(server, "packed")
        assert (version, found, leaked) == ("3", package, "")
        assert Path(prefix).parent == cache / "environments"
        assert Path(prefix, "unpacked_at").read_text() == prefix
        assert texts(server, "own", "packed")[0] == "3"
        assert texts(server, "packed", "servers")[0] == "1"
        assert server.pids("executor packed/1/0")  # setproctitle is there
        for row in server.show("models"):
            os.kill(row["pid"], signal.SIGKILL)
        server.wait_instances()
        assert [texts(server, model)[0] for model in ("own", "packed")] == ["2", "3"]
        assert texts(server, "packed")[1] == prefix
        assert server.control("unload", "packed")[0] == 200
        wait_until(lambda: not os.listdir(cache / "environments"), "the pack stays")
        assert server.control("load", "packed")[0] == 200
        assert texts(server, "packed")[0] == "3"
        server.wait_log("requirements.txt wants contradiction==9, which the server does not")
    assert os.listdir(cache / "environments") == []
    assert not (site / "__pycache__").exists()


def test_environments_that_cannot_run_executors_are_refused(tmp_path: Path) -> None:
    make = model_maker(tmp_path / "models")
    folders = {
        name: Path(make(MODEL, CONFIG, name))
        for name in ("old", "bare", "gone", "alien", "crash", "file")
    }
    fake_python(folders["old"] / ".venv", OLD)
    environment(folders["bare"] / ".venv", "2", packages=False)
    (folders["gone"] / ".venv" / "bin").mkdir(parents=True)
    (folders["gone"] / ".venv" / "bin" / "python").symlink_to("/no/such/python")
    fake_python(folders["alien"] / ".venv", "")
    (folders["alien"] / ".venv" / "bin" / "python").write_bytes(b"\x7fELF\x02\x01\x01" + bytes(99))
    crash = 'echo "$0: libpython3.11.so.1.0: cannot open" >&2; exit 127'
    fake_python(folders["crash"] / ".venv", crash)
    (folders["file"] / ".venv").write_text("elsewhere")
    (tmp_path / "models" / "data" / "1").mkdir(parents=True)
    (tmp_path / "models" / "data" / "1" / "model.joblib").touch()
    (tmp_path / "models" / "data" / ".venv").mkdir()
    broken = make(MODEL, CONFIG + NAMED % "pack.tar.gz", "broken")
    Path(broken, "pack.tar.gz").write_text("no archive")
    wanted = {
        "old": "it has Python 3.10.13, and 3.11 is the oldest that works: run `shmserve env build",
        "bare": "it has no msgspec (msgspec>=0.20 is needed): run `shmserve env build <path>",
        "gone": "its interpreter bin/python, or what bin/python leads to, is missing",
        "alien": "its interpreter bin/python is not for this machine",
        "crash": "bin/python ends with status 127: <path>: <file>: cannot open: run `shmserve env",
        "file": ".venv cannot be used: it is no folder: run `shmserve env build",
        "data": ".venv brings code: the setting allow_model_code must be true",
        "broken": "parameters.EXECUTION_ENV_PATH cannot be used: the pack is not an archive of tar",
    }
    settings = {**SMALL, "repository_cache_dir": tmp_path / "cache"}
    with Starting(tmp_path / "models", **settings) as server:
        for model, text in wanted.items():
            wait_until(lambda model=model: server.lives() and reason(server, model), "no reason")  # type: ignore[misc]
            assert text in reason(server, model)
            assert str(tmp_path) not in reason(server, model)
        server.wait_log(f"run `shmserve env build {folders['bare']}`")
        server.wait_log("bin/python: libpython3.11.so.1.0: cannot open")


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Return a Python whose new environments see the packages of the tests."""
    links = "\n".join(path for path in sys.path if path.endswith("site-packages"))
    script = f"""{sys.executable} "$@" || exit
for site in "$4"/lib/python*/site-packages; do
    [ -d "$site" ] && echo '{links}' > "$site/packages.pth"
done
exit 0"""
    return fake_python(tmp_path / "python", script) / "bin" / "python"


def test_the_command_builds_what_requirements_say(tmp_path: Path, python: Path) -> None:
    folder = Path(model_maker(tmp_path / "models")(MODEL, CONFIG, "m"))
    environ = servers_packages(tmp_path / "packages")
    environ |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "HOME": str(tmp_path)}
    for version in ("2", "3"):
        wheel(tmp_path, version)

    def build(requirement: str) -> subprocess.CompletedProcess[str]:
        (folder / "requirements.txt").write_text(requirement)
        words = [sys.executable, "-m", "shmserve", "env", "build", str(folder)]
        command = [*words, "--python", str(python)]
        env = {**os.environ, **environ}
        return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)

    done = build("contradiction==2\n")
    assert done.returncode == 0, done.stderr
    assert "contradiction 2" in done.stdout
    first = os.readlink(folder / ".venv")
    failed = build("contradiction==4\n")
    assert (failed.returncode, os.readlink(folder / ".venv")) == (2, first)
    assert "pip cannot install the packages" in failed.stderr
    builds = [name for name in os.listdir(folder) if name.startswith(".venv-")]
    assert builds == [first]
    (folder / ".venv-00000000").mkdir()  # an earlier build
    assert build("contradiction==3\n").returncode == 0
    second = os.readlink(folder / ".venv")
    # the former environment stays, for executors that run in it
    files = [".venv", first, second, "1", "config.pbtxt", "requirements.txt"]
    assert sorted(os.listdir(folder)) == sorted(files)
    with Server(tmp_path / "models", **SMALL) as server:
        assert texts(server, "m")[:2] == ["3", str((folder / ".venv").resolve())]


def wheel(folder: Path, version: str) -> None:
    about = f"contradiction-{version}.dist-info"
    files = {
        "contradiction.py": f"VERSION = '{version}'\n",
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: contradiction\nVersion: {version}\n",
        f"{about}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{about}/RECORD": "",
    }
    with zipfile.ZipFile(folder / f"contradiction-{version}-py3-none-any.whl", "w") as file:
        for name, text in files.items():
            file.writestr(name, text)
