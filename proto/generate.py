"""Generate shmserve/_generated from the .proto files beside this script.

    python proto/generate.py          write
    python proto/generate.py --check  exit with status 1 if anything is stale

Needs the grpcio-tools version that pyproject.toml pins (`pip install grpcio-tools==1.72.1`,
best in an environment of its own, since it may want an older protobuf): its code
runs on protobuf 6.30 and later, code of newer ones does not run on 6.x.

Messages only: the gRPC server registers its methods from the service's descriptor, so
that each can choose its own (de)serialiser.

Files below `standard/` describe services that other packages describe, too (grpc_health,
grpc_reflection). Each gets a descriptor pool of its own, so that a process may import both.
"""

import argparse
import re
import sys
import tempfile
from importlib import metadata
from pathlib import Path

PROTO = Path(__file__).resolve().parent
STANDARD = PROTO / "standard"
TARGET = PROTO.parent / "shmserve" / "_generated"
TOOLS_VERSION = "1.72.1"
# protoc writes imports of sibling files as top-level modules; ours live in a package
_SIBLING_IMPORT = re.compile(r"^import (\w+_pb2) as", re.MULTILINE)
_SHARED_POOL = "_descriptor_pool.Default()"


def generate() -> dict[str, str]:
    """File name to text of everything that belongs into the target folder."""
    from grpc_tools import protoc

    own = sorted(PROTO.glob("*.proto"))
    standard = sorted(STANDARD.rglob("*.proto"))
    with tempfile.TemporaryDirectory() as folder:
        for root, sources in ((PROTO, own), (STANDARD, standard)):
            paths = [str(path) for path in sources]
            status = protoc.main(["protoc", f"-I{root}", f"--python_out={folder}", *paths])
            if status:
                raise SystemExit(f"protoc failed with status {status}")
        texts = {path.name: path.read_text() for path in Path(folder).rglob("*.py")}
    apart = {f"{path.stem}_pb2.py" for path in standard}
    return {name: _packaged(text, name in apart) for name, text in texts.items()}


def _packaged(text: str, apart: bool) -> str:
    """The text as a module of our package; `apart`: with a descriptor pool of its own."""
    text = _SIBLING_IMPORT.sub(r"from shmserve._generated import \1 as", text)
    return text.replace(_SHARED_POOL, "_descriptor_pool.DescriptorPool()") if apart else text


def stale(wanted: dict[str, str]) -> list[str]:
    """Names of files that are missing, differ, or belong to no .proto any more."""
    present = {path.name: path.read_text() for path in TARGET.glob("*_pb2*.py")}
    return sorted(
        name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 if stale")
    arguments = parser.parse_args()
    try:
        version = metadata.version("grpcio-tools")
    except metadata.PackageNotFoundError:
        sys.exit(f"grpcio-tools is not installed: pip install grpcio-tools=={TOOLS_VERSION}")
    if version != TOOLS_VERSION:
        sys.exit(f"grpcio-tools {version} is installed, wanted {TOOLS_VERSION}")
    wanted = generate()
    names = stale(wanted)
    if arguments.check:
        if names:
            sys.stderr.write(f"stale, run proto/generate.py: {', '.join(names)}\n")
        return 1 if names else 0
    for name in names:
        if name in wanted:
            (TARGET / name).write_text(wanted[name])
        else:
            (TARGET / name).unlink()
        sys.stdout.write(f"updated {name}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
