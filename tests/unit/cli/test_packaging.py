"""Installed files: the units, and the contents of a wheel."""

import subprocess
import tomllib
from pathlib import Path

from shmserve.cli import main
from shmserve.cli.serving import init, serve, units

ROOT = Path(__file__).parents[3]


def install(folder: Path, app: Path = Path("/srv/app")) -> None:
    words = ["make", "--silent", "install", f"DESTDIR={folder}", "PREFIX=/usr", f"APP={app}"]
    subprocess.run(words, cwd=ROOT, check=True, timeout=60)


def test_units_are_installed_for_the_environment_that_runs_them(tmp_path) -> None:
    install(tmp_path)
    units = tmp_path / "usr/lib/systemd/system"
    shipped = {path.name for path in (ROOT / "deploy/systemd").iterdir()}
    shipped -= {"shmserve.sysusers", "shmserve.toml"}
    assert {path.name for path in units.iterdir()} == shipped
    service = (units / "shmserve.service").read_text()
    assert "ExecStart=/srv/app/bin/shmserve serve\n" in service
    assert "/opt/shmserve" not in service
    assert (tmp_path / "usr/lib/sysusers.d/shmserve.conf").is_file()


def written(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_command_writes_what_make_installs(tmp_path) -> None:
    app = tmp_path / "opt/shmserve-0.1"  # the name of the environment in the templates is a part
    (app / "bin").mkdir(parents=True)
    (app / "bin/shmserve").touch()
    made, told = tmp_path / "made", tmp_path / "told"
    install(made, app)
    assert main(["units", str(told), "--prefix", "/usr", "--app", str(app)]) == 0
    assert written(told) == written(made)
    assert len(written(told)) == 5
    service = (told / "usr/lib/systemd/system/shmserve.service").read_text()
    assert f"ExecStart={app}/bin/shmserve serve\n" in service


def test_the_settings_of_an_installation_stay(tmp_path) -> None:
    install(tmp_path)
    settings = tmp_path / "etc/shmserve/shmserve.toml"
    assert not any(table for table in tomllib.loads(settings.read_text()).values())
    settings.write_text("http_workers = 3\n")
    install(tmp_path)
    assert settings.read_text() == "http_workers = 3\n"


def test_a_wheel_brings_what_lies_outside_of_the_package() -> None:
    """`serve` and `init` look for these files inside the package, and in a checkout beside the
    package."""
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = wheel["targets"]["wheel"]
    assert included["packages"] == ["shmserve"]
    assert included["force-include"]["deploy/systemd"] == "shmserve/systemd"
    assert units.templates() == ROOT / "deploy/systemd"
    for found in (Path(serve.conf_file()), init.examples()):
        assert included["force-include"][found.name] == f"shmserve/{found.name}"
    assert (ROOT / "shmserve/py.typed").is_file()
