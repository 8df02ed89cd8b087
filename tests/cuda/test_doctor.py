"""`shmserve doctor` with the fake's devices, without devices, and with a driver that hangs."""

import json
import os
import sys
from pathlib import Path

import pytest

from shmserve.cli.inspecting import doctor, trials
from shmserve.cli.inspecting.trials import Trial, TrialFailed
from shmserve.config import Settings
from shmserve.cuda.device_trials import CudaFacts
from tests.cuda import fake, standin
from tests.servers import completed, run_shmserve


def ask(*arguments: str, **environment: str) -> tuple[int, str]:
    done = run_shmserve("doctor", *arguments, environ={**os.environ, **environment})
    assert done.stderr == ""
    return done.returncode, done.stdout


def cupy_version() -> str:
    if not standin.active():
        return "0-fake for CUDA 12.8"
    cupy = standin.imported()
    version = cupy.cuda.runtime.runtimeGetVersion()
    return f"{cupy.__version__} for CUDA {version // 1000}.{version % 1000 // 10}"


def test_a_host_whose_devices_work(compiled: Path) -> None:
    status, text = ask("--gpu", **fake.environment(compiled))
    assert status == 0
    for line in (
        "ok    NVIDIA driver: 570.0-fake",
        "ok    GPU 1: Fake GPU, 4096 MiB",
        "ok    CUDA_VISIBLE_DEVICES: not set, devices that a server sees: 2",
        f"ok    CuPy: {cupy_version()}",
        "ok    device 1: Fake GPU, 4096 MiB, compute capability 9.0",
        "ok    device 1: can compile and run kernels",
        "ok    device 1: can multiply matrices",
        "ok    device 0: can share memory with other processes",
        "ok    device 1: can share memory with other processes",
        "ok    device 0: can pin shared memory",
        "ok    device 0: can pin memory of frontends",
    ):
        assert f"{line}\n" in text
    assert "FAIL" not in text


def test_memory_of_frontends_is_pinned_also_where_none_can_be_that_is_read_only(
    compiled: Path,
) -> None:
    _, text = ask("--gpu", **fake.environment(compiled, pin="writable"))
    assert "ok    device 0: can pin memory of frontends\n" in text


def test_what_does_not_work_is_told_with_what_to_do(compiled: Path) -> None:
    environment = fake.environment(compiled, pin="no", peers=0)
    status, text = ask("--gpu", **environment, CUDA_VISIBLE_DEVICES="1,0,7")
    assert status == 0  # slower, but everything works
    assert "CUDA_VISIBLE_DEVICES: '1,0,7', devices that a server sees: 2\n" in text
    assert "warn  device 0: cannot pin shared memory: cudaErrorOperatingSystem" in text
    assert "raise the limit of locked memory\n" in text
    assert "warn  device 0: cannot pin memory of frontends: cudaErrorOperatingSystem" in text
    assert "note  device 0: reaches the memory of devices: none\n" in text


@pytest.mark.fake_only
def test_sizes_of_other_processes_memory_must_be_told(compiled: Path) -> None:
    status, text = ask("--gpu", **fake.environment(compiled) | {"LD_LIBRARY_PATH": ""})
    assert status == 1
    assert "FAIL  device 0: cannot share memory with other processes: OSError: libcuda.so.1" in text


def test_each_mig_device_is_tried_by_itself(compiled: Path) -> None:
    names = [f"MIG-fa4ec0da-1111-1111-1111-111111110{end}" for end in ("102", "203")]
    environment = fake.environment(compiled, mig="0,1")
    status, text = ask("--gpu", **environment, CUDA_VISIBLE_DEVICES=",".join(names))
    assert status == 0
    assert "ok    device 1: can share memory with other processes\n" in text
    status, text = ask("--gpu", **environment)
    assert f"for all of them set it to {names[0]}," in text


def test_a_host_without_devices(compiled: Path) -> None:
    none = fake.environment(compiled, devices="none")
    status, text = ask(**none)
    assert status == 0
    assert "note  NVIDIA driver: none is loaded, models run on the CPU; for GPUs install" in text
    assert f"note  CuPy: {cupy_version()}: cudaErrorInsufficientDriver" in text
    status, text = ask("--gpu", "--json", **none)
    assert status == 1
    found = {finding["subject"]: finding for finding in json.loads(text)}
    assert found["NVIDIA driver"]["level"] == found["CuPy"]["level"] == "FAIL"
    assert found["Python"] == {
        "level": "ok",
        "subject": "Python",
        "text": ".".join(map(str, sys.version_info[:3])),
        "todo": "",
    }


def test_missing_packages_name_their_extras(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor.gpu_findings.util, "find_spec", lambda name: None)  # type: ignore[attr-defined]
    monkeypatch.setattr(doctor, "_KERNEL", (0, 0))
    monkeypatch.setattr(doctor.gpus, "present", list)  # type: ignore[attr-defined]
    monkeypatch.setattr(doctor.gpus, "visible_devices", tuple)  # type: ignore[attr-defined]
    monkeypatch.setattr(doctor.gpu_findings.nvml, "bindings", lambda: None)  # type: ignore[attr-defined]
    assert doctor.run(Settings(), gpu=False, as_json=False) == 0
    told = capsys.readouterr().out
    for package, extra in (
        ("CuPy", "gpu"),
        ("nvidia-ml-py", "gpu"),
        ("onnxruntime", "onnx"),
        ("torch", "torch"),
    ):
        assert f"note  {package}: not installed" in told
        assert f"pip install 'shmserve[{extra}]'\n" in told
    assert doctor.run(Settings(), gpu=True, as_json=False) == 1
    assert "FAIL  CuPy: not installed; pip install 'shmserve[gpu]'\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("import time\ntime.sleep(60)", "a trial gave no answer within 0.5 s"),
        ("import os\nos.abort()", "a trial ended with signal SIGABRT"),
    ],
)
def test_a_driver_that_hangs_or_kills_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, reason: str
) -> None:
    (tmp_path / "cupy.py").write_text(program)
    monkeypatch.setattr(trials, "DEADLINE_S", 0.5 if "sleep" in program else 60.0)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    with Trial("devices", {**os.environ, "PYTHONPATH": path}) as trial:
        process = trial._process
        with pytest.raises(TrialFailed, match=reason):
            trial.result(CudaFacts)
    assert process.wait(30)  # ended, and not asleep


def test_the_command_line_itself_imports_no_cuda() -> None:
    program = (
        "import sys, shmserve.cli.inspecting.doctor, shmserve.cuda.device_trials\n"
        "print([m for m in sys.modules if m in ('cupy', 'torch', 'onnxruntime')])"
    )
    done = completed(sys.executable, "-c", program)
    assert done.stdout == "[]\n"
