"""From an empty node to its first answered request: `python -m bench.empty_node [--mib N ...]`.

moto's S3 server is another process of this host, so its own speed counts and the network's does
not. Three starts for each size of a model: the model in a folder of this host, in the store with an
empty cache, and in the store with what the start before has fetched. Seconds are from the launch of
the service to the end of the first inference, asked for again and again.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

from tests.faulty_store import KEYS, Moto
from tests.model_files import model_maker
from tests.running_server import RunningServer

_CONFIG = """
backend: "python"
input [ { name: "IN" data_type: TYPE_INT64 dims: [ 1 ] } ]
output [ { name: "OUT" data_type: TYPE_INT64 dims: [ 1 ] } ]
"""
_MODEL = """
import os
import numpy as np
class Model:
    def __init__(self, context):
        path = os.path.join(context.directory, context.spec.version, "weights")
        self.weights = np.fromfile(path, dtype=np.uint8)
    def infer(self, request):
        return {"OUT": np.array([self.weights.size])}
"""
_ONE = {"inputs": [{"name": "IN", "datatype": "INT64", "shape": [1], "data": [1]}]}
_LIMIT_S = 300.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 100, 500])
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    rows = [row for mib in arguments.mib for row in _measure(mib)]
    print("| model | where | first answer after |\n|---|---|---|")
    for row in rows:
        print(f"| {row['mib']} MiB | {row['where']} | {row['seconds']:.1f} s |")
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=1) + "\n")


def _measure(mib: int) -> list[dict[str, object]]:
    with tempfile.TemporaryDirectory(prefix="shmserve-bench-") as name:
        folder = Path(name)
        model = model_maker(folder / "models")(_MODEL, _CONFIG, "large")
        with Path(model, "1", "weights").open("wb") as file:
            for _ in range(mib):
                file.write(os.urandom(1 << 20))
        moto = Moto()
        try:
            moto.make_bucket("models")
            moto.put_folder(folder / "models", "models/prod")
            places = {
                "a folder": str(folder / "models"),
                "S3, empty cache": "s3://models/prod",
                "S3, filled cache": "s3://models/prod",
            }
            return [
                {"mib": mib, "where": where, "seconds": _first_answer(place, folder, moto)}
                for where, place in places.items()
            ]
        finally:
            moto.stop()


def _first_answer(repository: str, folder: Path, moto: Moto) -> float:
    environ = {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{moto.port}"}
    server = RunningServer(repository, environ, repository_cache_dir=folder / "cache")
    begun = time.monotonic()
    try:
        server.start(wait_ready=False)
        while time.monotonic() < begun + _LIMIT_S:
            try:
                if server.infer("large", _ONE)[0] == 200:
                    return time.monotonic() - begun
            except (OSError, ValueError):
                pass
            time.sleep(0.02)
        raise TimeoutError(f"no answer within {_LIMIT_S:g} s\n{server.log()[-2000:]}")
    finally:
        server.stop()
        server.kill_all()


if __name__ == "__main__":
    main()
