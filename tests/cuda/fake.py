"""Environment variables with which a process sees the fake of CUDA, or the stand-in."""

import os
import subprocess
from pathlib import Path

from tests.cuda import standin

FOLDER = Path(__file__).parents[1] / "fake_cuda"


def libcuda(folder: Path) -> Path:
    """Return the fake libcuda.so.1 in `folder`; compile it if missing."""
    made = folder / "libcuda.so.1"
    if not made.exists():
        options = ("-shared", "-fPIC", "-Wl,-soname,libcuda.so.1")
        source = FOLDER / "libcuda.c"
        subprocess.run(["cc", *options, "-o", made, source], check=True, timeout=60)
    return made


def environment(folder: Path, **faults: object) -> dict[str, str]:
    """Return variables for a server or a program. `folder` caches compiled files.

    `faults` are the fake's settings without their prefix, in lower case: ``devices="none"``,
    ``mig="0"``, ``memory=1 << 20``, ``peers=0``, ``pin="no"``, ``broken=path``,
    ``lacks="GetPowerUsage"``. Their meaning is in fake_devices.py, cupy/_fake.py and pynvml.py.
    """
    if standin.active():  # this process already has the other variables
        return standin.settings(**faults)
    before = {"PYTHONPATH": FOLDER, "LD_LIBRARY_PATH": libcuda(folder).parent}
    told = {
        name: os.pathsep.join([str(path), *filter(None, [os.environ.get(name)])])
        for name, path in before.items()
    }
    return told | {f"FAKE_CUDA_{name.upper()}": str(value) for name, value in faults.items()}
