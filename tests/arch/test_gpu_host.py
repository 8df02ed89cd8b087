"""`make wheels`, and the installation by `make test-gpu` on a host without network."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
OF_THE_HOST = {"numpy"}  # the host's CuPy and torch need it
OF_THE_TREE = {"shmserve-client"}  # runs from the tree


def wheel(folder: Path, name: str, version: str) -> None:
    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as file:
        about = f"{name}-{version}.dist-info"
        file.writestr(f"{name}.py", "")
        file.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        file.writestr(
            f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        file.writestr(f"{about}/RECORD", "")


def test_every_dependency_of_the_server_is_fetched_in_a_version_that_will_do() -> None:
    lines = (ROOT / "tests/gpu-requirements.txt").read_text().splitlines()
    pins = [Requirement(line.partition("#")[0]) for line in lines if line.partition("#")[0].strip()]
    versions = {canonicalize_name(pin.name): next(iter(pin.specifier)).version for pin in pins}
    assert all(str(pin.specifier).startswith("==") for pin in pins)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {canonicalize_name(r.name): r for r in map(Requirement, project["dependencies"])}
    for name in needed.keys() - OF_THE_HOST - OF_THE_TREE:
        assert versions[name] in needed[name].specifier, name
    for name in ("nvidia-ml-py", "pytest", "pytest-timeout", "hypothesis", "tritonclient"):  # type: ignore[assignment]
        assert name in versions


def test_what_a_python_has_as_new_is_left_alone(tmp_path: Path) -> None:
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    for name, version in (("pluggy", "0.1"), ("pytest", "999.0"), ("nothing_of_that_name", "1.0")):
        wheel(wheels, name, version)
    subprocess.run([sys.executable, ROOT / "tests/gpu_site.py", wheels, site], check=True)
    assert {path.name for path in site.glob("*.py")} == {"pytest.py", "nothing_of_that_name.py"}
