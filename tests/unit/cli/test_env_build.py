"""`shmserve env build`: two builds of one folder."""

import os
import sys
from pathlib import Path

import pytest

from shmserve import cli
from tests.environments import fake_python


def test_a_second_build_of_a_folder_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each build ends with the removal of other unfinished folders."""
    folder = tmp_path / "m"
    folder.mkdir()
    other = fake_python(tmp_path / "other", "") / "bin" / "python"
    build = f"{sys.executable} -m shmserve env build {folder} --python"
    script = f"""case "$3" in venv)
    mkdir "$4"
    {build} {other}
    echo "status $?, $(ls -A {folder} | wc -l) folder"
    exit 1
esac"""
    first = fake_python(tmp_path / "first", script) / "bin" / "python"
    assert cli.main(["env", "build", str(folder), "--python", str(first)]) == 2
    out, err = capfd.readouterr()
    assert "status 2, 1 folder" in out
    assert f"shmserve: {folder}: another `shmserve env build` is under way there: wait" in err
    assert os.listdir(folder) == []
