"""The two wheels of the tree: their files, and the client's wheel in a separate environment."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import shmserve
from tests.running_server import RunningServer
from tests.servers import output

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parent / "client_user.py"
NEEDED = ("numpy", "msgspec")


def run(*words: str | Path, cwd: Path = ROOT) -> str:
    return output(*words, cwd=cwd)


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build both wheels; keys are project names."""
    folder = tmp_path_factory.mktemp("wheels")
    for project in (ROOT, ROOT / "client"):
        run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=project)
    return {path.name.partition("-")[0]: path for path in folder.glob("*.whl")}


@pytest.fixture(scope="module")
def client_python(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python with the client's wheel and the dependencies that pip asks for.

    Dependencies are linked from this environment, so nothing is fetched.
    """
    venv = tmp_path_factory.mktemp("client") / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    python = venv / "bin" / "python"
    (site,) = venv.glob("lib/python*/site-packages")
    for name in NEEDED:
        found = metadata.distribution(name)
        for part in {file.parts[0] for file in found.files or []} - {".."}:
            (site / part).symlink_to(str(found.locate_file(part)))
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "--quiet")
    run(*pip, "--no-index", wheels["shmserve_client"])
    return python


def members(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as file:
        return {name for name in file.namelist() if ".dist-info/" not in name}


def test_each_file_of_the_package_is_in_one_wheel(wheels: dict[str, Path]) -> None:
    server, client = members(wheels["shmserve"]), members(wheels["shmserve_client"])
    assert server & client == set()
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "shmserve").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    beside = {
        name for name in server if name.startswith(("shmserve/workers/", "shmserve/systemd/"))
    }
    assert server | client == package | beside | {"shmserve/gunicorn.conf.py"}


def test_who_has_only_the_wheels_can_make_it_a_service(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    venv, root = tmp_path / "venv", tmp_path / "root"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    (site,) = venv.glob("lib/python*/site-packages")
    # dependencies of third parties
    (site / "needed.pth").write_text(sysconfig.get_path("purelib"))
    pip = (sys.executable, "-m", "pip", "--python", venv / "bin/python", "install", "--quiet")
    run(*pip, "--no-index", "--no-deps", *wheels.values())
    program = venv / "bin/shmserve"
    told = run(program, "units", root, cwd=tmp_path)
    unit = (root / "usr/local/lib/systemd/system/shmserve.service").read_text()
    assert f"ExecStart={program} serve\n" in unit
    assert f"ExecStartPre={program} check\n" in unit
    assert "/opt/shmserve" not in unit
    settings = root / "etc/shmserve/shmserve.toml"
    assert str(settings) in told
    assert (root / "usr/local/lib/sysusers.d/shmserve.conf").is_file()
    settings.write_text("http_workers = 3\n")
    assert f"{settings} stays as it is" in run(program, "units", root, cwd=tmp_path)
    assert settings.read_text() == "http_workers = 3\n"
    # the wheel includes the files that the template needs
    run(program, "init", "demo", cwd=tmp_path)
    assert (tmp_path / "demo/workers/identity/config.pbtxt").is_file()


def test_pipx_installs_the_wheels_as_the_guide_types_it(
    wheels: dict[str, Path], tmp_path: Path
) -> None:
    """pipx hands the guide's `--pip-args` to pip, in an environment without the client."""
    (line,) = re.findall(r"^pipx install .*", (ROOT / "docs/install.md").read_text(), re.MULTILINE)
    (tmp_path / "dist").mkdir()
    for wheel in wheels.values():
        shutil.copy(wheel, tmp_path / "dist")
    venv = tmp_path / "venv"
    run(sys.executable, "-m", "venv", "--without-pip", venv)
    (site,) = venv.glob("lib/python*/site-packages")
    for path in Path(sysconfig.get_path("purelib")).iterdir():  # the index
        if not path.name.lstrip("_").startswith("shmserve"):
            (site / path.name).symlink_to(path)
    pip = f"{sys.executable} -m pip --python {venv}/bin/python install --quiet --no-index"
    # what pipx does with its words
    script = f"""pipx() {{
        case "$2" in --pip-args=*) set -- "$1" ${{2#--pip-args=}} "$3";; esac
        shift; {pip} "$@"
    }}\n"""
    without = line.replace(re.findall(r"--pip-args=\S+ \S+ ", line)[0], "")
    done = subprocess.run(["bash", "-c", script + without], cwd=tmp_path, capture_output=True)
    assert b"No matching distribution found for shmserve-client" in done.stderr
    run("bash", "-c", script + line, cwd=tmp_path)
    told = run(venv / "bin/shmserve", "--version", cwd=tmp_path)
    assert re.fullmatch(rf"shmserve {shmserve.__version__} \(build [0-9a-f]{{12}}\)\n", told)


@pytest.mark.parametrize("project", [".", "client"])
def test_a_source_distribution_has_all_of_its_own(project: str, tmp_path: Path) -> None:
    build = (sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", tmp_path)
    run(*build, cwd=ROOT / project)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as file:
        members = {member.name: member for member in file}
        for name, member in members.items():
            if member.issym():  # the file is in the archive as well
                assert os.path.normpath(f"{name}/../{member.linkname}") in members
        names = {name.partition("/")[2] for name in members}
    assert {"LICENSE", "README.md", "shmserve/client/aio.py"} <= names


def test_the_server_wants_the_client_of_its_own_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert f"shmserve-client=={shmserve.__version__}" in project["dependencies"]


def test_the_client_alone_talks_to_a_server(client_python: Path, server: RunningServer) -> None:
    away_from_the_tree = client_python.parent
    told = run(client_python, PROGRAM, f"unix:{server.unix_path}", cwd=away_from_the_tree)
    assert told == "lane\n"


def test_the_client_is_typed_where_it_is_installed(client_python: Path, tmp_path: Path) -> None:
    mypy = (sys.executable, "-m", "mypy", "--config-file=", f"--cache-dir={tmp_path}", "--strict")
    # inside the tree, the program would import the tree's client
    program = shutil.copy(PROGRAM, tmp_path)
    run(*mypy, f"--python-executable={client_python}", program, cwd=tmp_path)
