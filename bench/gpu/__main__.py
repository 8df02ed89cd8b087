import argparse
import contextlib
import json
import sys
import time
import traceback
from pathlib import Path

import cupy

import bench.gpu
from bench.gpu import copies, deaths, executors, overlap, regions, rounds
from bench.gpu.timing import FAKE, GIB, KIB, MIB, NO_TIMING
from bench.run import commit, machine
from tests.running_server import RunningServer

HERE = Path(__file__).parent
PARTS = "copies", "regions", "overlap", "deaths", "executors", "rounds"
ROUNDS_S = 200  # for each protocol; a tenth with --quick


def parse():
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=bench.gpu.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="few rounds")
    parser.add_argument("--only", default=",".join(PARTS), help="comma-separated parts")
    parser.add_argument("--output", default=str(HERE.parent / "results" / "gpu-latest.json"))
    options = parser.parse_args()
    options.only = options.only.split(",")
    if unknown := set(options.only) - set(PARTS):
        parser.error(f"unknown parts: {', '.join(sorted(unknown))}")
    return options


def gpu():
    """Return a description of the GPU."""
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


def parts(options):
    """Return functions that measure each part on a server; argument `results`: results so far."""
    quick = options.quick
    tiny = quick and FAKE
    large = 1 * MIB if tiny else 64 * MIB
    sizes = (64 * KIB, 1 * MIB) if tiny else tuple(n * MIB for n in (1, 16, 64, 256))

    def overlapping(server, results):
        rows = results.get("copies", {}).get("rows", {})
        row = rows.get("own segment, system region")
        copy_s = 0.0 if FAKE or row is None else row["ms"]["p50"] / 1e3
        return overlap.measure(server, large, 0.3 if quick else 4.0, 2 if quick else 5, copy_s)

    dying = (1 * MIB, 1) if tiny else (1 * GIB, 1 if quick else 5)
    cycles = 20 if tiny else 500 if quick else 10_000
    return {
        "copies": lambda _, __: copies.measure(large, 5 if tiny else 20 if quick else 200),
        "regions": lambda server, _: regions.measure(
            server, sizes, 8 if tiny else 40 if quick else 400
        ),
        "overlap": overlapping,
        "deaths": lambda server, _: deaths.measure(server, *dying),
        "executors": lambda server, _: executors.measure(server, 1 if tiny else 3 if quick else 10),
        "rounds": lambda server, _: rounds.measure(
            server, cycles, ROUNDS_S / 10 if quick else ROUNDS_S
        ),
    }


def measure(options, document, write):
    """Put results into `document`, by part; a part that fails has its error as its problem."""
    results, server = document.setdefault("parts", {}), None
    with contextlib.ExitStack() as stack:
        for name, part in parts(options).items():
            if name not in options.only:
                continue
            print(f"measuring {name}", file=sys.stderr, flush=True)
            begin = time.monotonic()
            try:
                if server is None and name != "copies":
                    server = RunningServer(HERE / "models", http_workers=2)
                    stack.enter_context(server)
                results[name] = part(server, results)
            except Exception as ex:
                traceback.print_exc()
                results[name] = {"problems": [f"{type(ex).__name__}: {ex}"[:2000]]}
            results[name]["took_s"] = round(time.monotonic() - begin, 1)
            write()
            show({name: results[name]})
    if server is not None and (left := server.leaks()):
        results["left"] = {"problems": left}
        write()


def main():
    options = parse()
    document = {"method": bench.gpu.__doc__, "machine": machine(), "gpu": gpu(), "commit": commit()}
    document["date"] = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
    document["options"] = {"quick": options.quick, "only": options.only}
    show({name: document[name] for name in ("machine", "gpu", "commit", "date", "options")})
    output = Path(options.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    measure(options, document, lambda: output.write_text(json.dumps(document, indent=1) + "\n"))
    problems = {
        name: part["problems"] for name, part in document["parts"].items() if part["problems"]
    }
    print(f"problems: {json.dumps(problems) if problems else 'none'}", flush=True)
    return 1 if problems else 0


def show(results, depth=0):
    """Print nested results, with a line for each object that holds only short values."""
    for name, value in results.items():
        text = json.dumps(value)
        if isinstance(value, dict) and len(text) > 200:
            print(f"{'  ' * depth}{name}:")
            show(value, depth + 1)
        else:
            print(f"{'  ' * depth}{name}: {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
