import argparse
import json
import sys
import time
from pathlib import Path

import cupy

import bench.gpu
from bench.gpu import copies, deaths, overlap, regions, rounds
from bench.gpu.timing import FAKE, GIB, KIB, MIB, NO_TIMING
from bench.run import commit, machine
from shmserve.testing.server import RunningServer

HERE = Path(__file__).parent
PARTS = "copies", "regions", "overlap", "rounds", "deaths"


def parse():
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=bench.gpu.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="small tensors, few rounds")
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated parts")
    parser.add_argument("--output", default=str(HERE.parent / "results" / "gpu-latest.json"))
    options = parser.parse_args()
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    return options


def gpu():
    """What it was measured on."""
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    return {
        "name": properties["name"].decode(),
        "memory_gib": round(properties["totalGlobalMem"] / GIB, 1),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "cuda_driver": runtime.driverGetVersion(),
        "cupy": cupy.__version__,
        "timing": NO_TIMING if FAKE else "measured",
    }


def measure(options):
    """Results by part."""
    quick, found = options.quick, {}
    large = 1 * MIB if quick else 64 * MIB
    copied = copies.measure(large, 5 if quick else 200)
    found["copies"] = copied
    copy_s = 0.0 if FAKE else copied["rows"]["own segment, system region"]["ms"]["p50"] / 1e3
    sizes = (64 * KIB, 1 * MIB) if quick else tuple(n * MIB for n in (1, 16, 64, 256))
    calls = {
        "regions": lambda server: regions.measure(server, sizes, 8 if quick else 400),
        "overlap": lambda server: overlap.measure(
            server, large, 0.3 if quick else 4.0, 2 if quick else 5, copy_s
        ),
        "rounds": lambda server: rounds.measure(server, 20 if quick else 10_000),
        "deaths": lambda server: deaths.measure(
            server, 1 * MIB if quick else 1 * GIB, 1 if quick else 5
        ),
    }
    if wanted := [name for name in calls if name in options.only]:
        with RunningServer(HERE / "models", http_workers=2) as server:
            for name in wanted:
                print(f"measuring {name}", file=sys.stderr)
                found[name] = calls[name](server)
        if left := server.leaks():
            found["left"] = {"problems": left}
    return found


def main():
    options = parse()
    started = time.gmtime()
    told = {"machine": machine(), "gpu": gpu(), "commit": commit()}
    told["date"] = time.strftime("%Y-%m-%d %H:%M:%S", started)
    told["options"] = {"quick": options.quick, "only": options.only}
    told["parts"] = measure(options)
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(told, indent=1) + "\n")
    show(told)
    return 1 if any(part["problems"] for part in told["parts"].values()) else 0


def show(told, depth=0):
    """Nested results, a line for each object that holds no other but short ones."""
    for name, value in told.items():
        text = json.dumps(value)
        if isinstance(value, dict) and len(text) > 200:
            print(f"{'  ' * depth}{name}:")
            show(value, depth + 1)
        else:
            print(f"{'  ' * depth}{name}: {text}")


if __name__ == "__main__":
    sys.exit(main())
