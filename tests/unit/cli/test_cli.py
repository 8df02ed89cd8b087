"""The command line, without a server."""

import sys

import msgspec
import pytest

from shmserve import cli
from shmserve.cli.inspecting import check
from shmserve.cli.operating import show
from shmserve.cli.serving import serve
from shmserve.config import Settings
from shmserve.errors import Unavailable
from shmserve.protocol.triton_config.model_config import parse
from shmserve.tensor.spec import ModelSpec
from tests.unit.coordinator.test_coordinator_parts import Folder as FullFolder
from tests.unit.coordinator.test_coordinator_parts import Scan


class Folder(FullFolder):
    def instances(self):
        return []


@pytest.fixture
def settings(tmp_path):
    return Settings(model_repository=(str(tmp_path),), run_dir=str(tmp_path / "run"))


def test_check_tells_one_line_each_and_fails_on_a_problem(settings, capsys):
    good = Scan({"m": Folder((ModelSpec("m", "1", "", "python", 0, (), ()),))})
    assert check.check(settings, lambda paths: good) == 0
    assert "ok    model m version 1: python, 0 instances" in capsys.readouterr().out
    assert check.check(settings, lambda paths: Scan({}, {"bad": "line 3"})) == 1
    assert "FAIL  model bad: line 3" in capsys.readouterr().out


def test_check_names_the_models_that_an_ensemble_lacks(settings, capsys):
    step = "step { model_name: '%s' model_version: -1 %s }"
    first = step % ("m", "input_map { key: 'X' value: 'I' } output_map { key: 'Y' value: 'O' }")
    second = step % ("z", "input_map { key: 'X' value: 'I' } output_map { key: 'Y' value: 'a' }")
    tensors = " ".join(
        f"{kind} {{ name: '{kind[0].upper()}' data_type: TYPE_FP32 dims: [ 1 ] }}"
        for kind in ("input", "output")
    )
    text = f"platform: 'ensemble' {tensors} ensemble_scheduling {{ {first} %s }}"
    ensemble, other = (parse(text % more, "e").spec("1") for more in (second, ""))
    model = ModelSpec("m", "1", "", "python", 0, (), ())
    assert check.check(settings, lambda paths: Scan({"e": Folder((ensemble,))}), load=True) == 1
    assert "FAIL  model e version 1: steps are not served: m, z" in capsys.readouterr().out
    both = Scan({"e": Folder((other,)), "m": Folder((model,))})
    assert check.check(settings, lambda paths: both) == 0
    assert "ok    model e version 1: ensemble, 1 step\n" in capsys.readouterr().out


def test_check_fails_without_a_repository(tmp_path, capsys):
    settings = Settings(model_repository=(str(tmp_path / "none"),))
    assert check.check(settings, lambda paths: Scan({})) == 1
    assert "is not a directory" in capsys.readouterr().out


@pytest.mark.parametrize(("mib", "finding", "status"), [(1, "FAIL", 1), (4, "warn", 0)])
def test_check_tells_of_a_pool_too_small_for_the_processes(settings, capsys, mib, finding, status):
    small = msgspec.structs.replace(
        settings, pool_bytes=mib << 20, http_workers=2, grpc_processes=1
    )
    model = Folder((ModelSpec("m", "1", "", "python", 0, (), ()),))
    assert check.check(small, lambda paths: Scan({"m": model})) == status
    told = f"{finding}  memory: the pool of {mib} MiB is too small for 3 processes: set SHMSERVE_"
    assert f"{told}POOL" in capsys.readouterr().out


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_check_reads_the_certificates(settings, capsys, protocol):
    files = {f"{protocol}_tls_cert": "/none.pem", f"{protocol}_tls_key": "/none.key"}
    wrong = msgspec.structs.replace(settings, **files)
    assert check.check(wrong, lambda paths: Scan({})) == 1
    assert f"FAIL  {protocol}_tls_" in capsys.readouterr().out


def test_a_bad_setting_is_told_and_fails(monkeypatch, capsys):
    monkeypatch.setenv("SHMSERVE_NONSENSE", "1")
    assert cli.main(["check"]) == 2
    assert capsys.readouterr().err == (
        "shmserve: unknown setting SHMSERVE_NONSENSE in the environment\n"
    )


def test_show_without_a_server_says_so(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SHMSERVE_RUN_DIR", str(tmp_path))
    assert cli.main(["show", "models"]) == 2
    words = f"shmserve: no server answers in the run directory {tmp_path}; SHMSERVE_CONFIG or"
    text = capsys.readouterr().err
    assert text.startswith(words)
    assert text.endswith(", or it is still starting: `shmserve ready --wait 60`\n")
    with pytest.raises(Unavailable):
        show.ask(str(tmp_path), "models")


def test_serve_becomes_gunicorn_with_our_configuration():
    words = serve.command(["--reload"])
    assert words[:5] == [sys.executable, "-P", "-m", "shmserve.supervisor.foreground", "-c"]
    assert words[5].endswith("gunicorn.conf.py")
    assert words[6:] == ["--reload", "shmserve.app"]


def test_tables_are_aligned_numbers_to_the_right():
    rows = [{"role": "http", "pid": 5}, {"role": "executor", "pid": 12345, "reason": "a\nb"}]
    assert show.table(rows).splitlines() == [
        "role        pid  reason",
        "http          5",
        "executor  12345  a b",
    ]
