"""Environments of models: choice and requirements."""

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from packaging.requirements import Requirement

from shmserve import repository
from shmserve.config import Settings
from shmserve.errors import ConfigError
from shmserve.executor.process import environment_start, environments
from shmserve.executor.process.environments import Environment
from shmserve.protocol.control.link_messages import Instance
from tests.environments import fake_python
from tests.model_files import X_TO_Y, model_maker, native

NAMED = "parameters { key: 'EXECUTION_ENV_PATH' value { string_value: '%s' } }"


def instance(folder: Path, config: str = X_TO_Y) -> Instance:
    if not (folder / "m").exists():
        model_maker(folder)(native("pass"), config)
    return repository.read_folder(str(folder / "m")).instances()[0]


def chosen(folder: Path, config: str = X_TO_Y, permitted: bool = False) -> Environment | None:
    return environments.choose(instance(folder, config), permitted)


def test_the_environment_that_a_model_has(tmp_path: Path) -> None:
    assert chosen(tmp_path) is None
    for place in (tmp_path / "m" / ".venv", tmp_path / "m" / "1" / ".venv"):
        place.mkdir()
        found = chosen(tmp_path)
        assert found is not None
        assert (found.name, found.place) == (".venv", str(place))
        assert found.remedy == f"run `shmserve env build {place.parent}`"


@pytest.mark.parametrize("given", ["e", "../e", "$$TRITON_MODEL_DIRECTORY/../e", "{absolute}"])
def test_the_environment_that_a_configuration_names(tmp_path: Path, given: str) -> None:
    place = tmp_path / "m" / "e" if given == "e" else tmp_path / "e"
    named = NAMED % given.format(absolute=place)
    spec = instance(tmp_path, X_TO_Y + named)
    with pytest.raises(ConfigError, match=r"EXECUTION_ENV_PATH is '.*': there is no such file"):
        environments.choose(spec, False)
    place.mkdir()
    (tmp_path / "m" / ".venv").mkdir()
    found = environments.choose(spec, False)
    assert found is not None
    assert Path(found.place).resolve() == place


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("numpy\n# a remark\n--no-index\nmsgspec >= 0.1  # here\n", ""),
        ("nothing; python_version < '3'\n", ""),
        ("numpy==1.0 --hash=sha256:00 \\\n", r"wants numpy==1\.0, and the server has \d"),
        ("no_such_package\n", "wants no_such_package, which the server does not have"),
        ("\ufeffnumpy\r\nmsgspec>=0.1\r\n", ""),
        ("\ufeffno_such_package\r\n", "wants no_such_package, which the server does not have"),
        ("./folder\ngit+https://localhost/a\nnumpy[extra]\n-r other.txt\n", ""),
        ("x; python_version >= 'y'\n", ""),
        ("no_such \\\n  ; python_version < '3'\nmsgspec>=0.1,\\\n<999\n", ""),
        ("numpy>=1,\\\n  <1.1\n", r"wants numpy>=1, <1\.1, and the server has \d"),
        ("no_such\t# why\n", "wants no_such, which the server does not have"),
        ("# why \\\nno_such\n", "wants no_such, which the server does not have"),
        ("numpy>=999\\\n# why\n", "wants numpy>=999, and the server has"),
        ("numpy == 1.0 -C a=b\n", r"wants numpy == 1\.0, and the server has \d"),
        ("no_such @ https://user:word@localhost/x.whl\n", "wants no_such, which the server does"),
        ("numpy @ https://localhost/x.whl\nhttps://localhost/y.whl\n-e .\n-c x.txt\n", ""),
        ("numpy[a,b]~=1.0 ; extra == 'c'\nmsgspec[x]~=0.1\nmsgspec!=0.1.*\n", ""),
        ("numpy===0.arbitrary\n", "wants numpy===0.arbitrary, and the server has"),
        ("numpy==${VERSION}\nnumpy=>1\n", ""),
    ],
)
def test_requirements_without_an_environment(tmp_path: Path, text: str, fault: str) -> None:
    spec = instance(tmp_path)
    (tmp_path / "m" / "requirements.txt").write_text(text, encoding="utf-8")
    assert environments.choose(spec, False) is None
    advice = environments.unmet(spec)
    if fault:
        assert re.search(rf"{fault}.*: run `shmserve env build {tmp_path}/m`", advice)
    else:
        assert advice == ""


def test_a_package_without_a_version_is_not_compared(tmp_path: Path, monkeypatch: Any) -> None:
    spec = instance(tmp_path)
    (tmp_path / "m" / "requirements.txt").write_text("numpy>=1\nno_such\n")
    found = metadata.version
    monkeypatch.setattr(metadata, "version", lambda n: None if n == "numpy" else found(n))
    assert "wants no_such" in environments.unmet(spec)


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        (r"printf 'An error: why\n\nThread:\n <no frame>\n' >&2; exit 1", "1: An error: why"),
        (r"printf 'what\n\001last\377\n' >&2; exit 2", "2: last�"),
        ("exit 3", "3"),
        ("head -c 99999 /dev/zero | tr '\\0' x >&2; exit 4", "4: " + "x" * 499 + "…"),
        ("kill -9 $$", ""),
    ],
)  # fmt: skip
def test_a_python_that_does_not_start_says_why(tmp_path: Path, script: str, fault: str) -> None:
    spec = instance(tmp_path)
    fake_python(tmp_path / "m" / ".venv", script)
    found = environments.choose(spec, False)
    assert found is not None
    try:
        environments.prepare(found, Settings())
        told = ""
    except ConfigError as ex:
        told = ex.message
    assert told == (f"its interpreter bin/python ends with status {fault}" if fault else "")


def test_a_link_is_followed_before_an_executor_starts(tmp_path: Path) -> None:
    spec = instance(tmp_path)
    (tmp_path / "m" / ".venv-1").mkdir()
    (tmp_path / "m" / ".venv").symlink_to(".venv-1")
    found = environments.choose(spec, False)
    assert found is not None
    assert environments.prepare(found, Settings()) == (str(tmp_path / "m" / ".venv-1"), -1)


def test_the_servers_own_environment_needs_no_other_python(
    tmp_path: Path, monkeypatch: Any
) -> None:
    spec = instance(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / "m" / ".venv"))
    (tmp_path / "m" / ".venv").mkdir()
    assert environments.choose(spec, False) is None


def test_models_that_are_data_need_the_permission(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").touch()
    (tmp_path / "m" / ".venv").mkdir()
    config = X_TO_Y.replace("python", "onnxruntime")
    for more, name in (("", r"\.venv"), (NAMED % ".venv", r"parameters\.EXECUTION_ENV_PATH")):
        (tmp_path / "m" / "config.pbtxt").write_text(config + more)
        with pytest.raises(ConfigError, match=f"'m': {name} brings code: .*allow_model_code must"):
            chosen(tmp_path)
        assert chosen(tmp_path, permitted=True) is not None


def test_what_an_environment_lacks_is_said(monkeypatch: Any) -> None:
    versions = {"msgspec": "0.20", "numpy": "1.26.4", "ml_dtypes": "0.4.1", "protobuf": "7.1"}
    versions["posix_ipc"] = "1.2.0"
    fault = environment_start.fault

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    assert fault() == ""
    versions["protobuf"] = "8.0"
    assert fault() == "it has protobuf 8.0, and protobuf>=6.30,<8 is needed"
    versions["numpy"] = "1.9.3"
    assert fault() == "it has numpy 1.9.3, and numpy>=1.26 is needed"
    del versions["msgspec"]
    assert fault() == "it has no msgspec (msgspec>=0.20 is needed)"
    broken = (("no.such", "numpy", "1.0", ""),)
    monkeypatch.setattr(environment_start, "NEEDED", broken)
    assert fault() == "its package numpy 1.9.3 cannot be imported: No module named 'no'"
    old = SimpleNamespace(version_info=(3, 10, 13))
    monkeypatch.setattr(environment_start, "sys", old)
    assert fault() == "it has Python 3.10.13, and 3.11 is the oldest that works"


def test_the_server_installs_what_executors_need() -> None:
    root = Path(__file__).parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    servers = {r.name: r.specifier for r in map(Requirement, project["dependencies"])}
    for _, *row in environment_start.NEEDED:
        own = Requirement(environment_start.requirement(*row))
        assert own.specifier == servers[own.name]
