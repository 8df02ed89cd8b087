"""Build the clients of the interop matrix, with stubs generated from proto/, below `.interop/`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tests.needs import NODE_PACKAGES, ROOT

HERE = Path(__file__).parent
BUILD = ROOT / ".interop"
_BUILD_S = 600
_GO_LIBRARIES = Path("/usr/share/gocode")  # where Debian has the sources of packages
_JARS = Path("/usr/share/java")
_NETTY = (
    "buffer",
    "codec",
    "codec-http",
    "codec-http2",
    "common",
    "handler",
    "resolver",
    "transport",
)
_JAVA_LIBRARIES = (
    *(f"grpc-{part}" for part in ("api", "context", "core", "netty", "protobuf", "stub")),
    *("protobuf-lite", "grpc-protobuf-lite", "protobuf", "guava", "failureaccess"),
    *(f"netty-{part}" for part in _NETTY),
    *("perfmark-api", "gson", "geronimo-annotation-1.3-spec", "jsr305"),
)


@dataclass(frozen=True)
class Client:
    """A client program that can run: `command` takes HOST:PORT CELL MESSAGES IDLE_S."""

    command: tuple[str, ...]
    environ: dict[str, str] = field(default_factory=dict)
    leaves_out: dict[str, str] = field(default_factory=dict)  # cell -> why the library cannot


class Missing(Exception):
    """A client cannot be built on this machine; the text says what to install."""


def _run(*command: str | Path, **environ: str) -> None:
    words = [str(word) for word in command]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=_BUILD_S, env=os.environ | environ
    )
    if done.returncode:
        raise Missing(f"{Path(words[0]).name} failed: {(done.stderr or done.stdout)[-1500:]}")


def _need(debian: str, *programs: str | Path) -> None:
    missing = [str(p) for p in programs if not (shutil.which(str(p)) or Path(p).exists())]
    if missing:
        raise Missing(f"{', '.join(missing)} is missing: apt-get install {debian}")


def _protoc(folder: Path, *arguments: str, common: bool = True) -> None:
    """Generate code of our service and, if `common`, of health and reflection."""
    folder.mkdir(parents=True, exist_ok=True)
    _need("protobuf-compiler", "protoc")
    _run("protoc", f"-I{ROOT / 'proto'}", *arguments, "grpc_service.proto", "model_config.proto")
    if common:
        files = [module.DESCRIPTOR for module in (health_pb2, reflection_pb2)]
        described = FileDescriptorSet()
        for file in files:
            file.CopyToProto(described.file.add())
        (BUILD / "common.pb").write_bytes(described.SerializeToString())
        names = [file.name for file in files]
        _run("protoc", f"--descriptor_set_in={BUILD / 'common.pb'}", *arguments, *names)


def _grpcio() -> Client:
    folder = BUILD / "python"
    folder.mkdir(parents=True, exist_ok=True)
    outputs = (f"--python_out={folder}", f"--grpc_python_out={folder}", f"-I{ROOT / 'proto'}")
    names = ("grpc_service.proto", "model_config.proto")
    _run(sys.executable, "-m", "grpc_tools.protoc", *outputs, *names)
    program = str(HERE / "grpcio_client.py")
    return Client((sys.executable, program), {"PYTHONPATH": str(folder)})


def _grpclib() -> Client:
    made = _grpcio()
    lacks = {
        "gzip": "grpclib sends no compressed messages",
        "drain": "a GOAWAY ends all calls of grpclib",
    }
    return Client((sys.executable, str(HERE / "grpclib_client.py")), made.environ, lacks)


def _stale(target: Path, program: str) -> bool:
    """Return whether a client is missing, or older than its program, proto/ or this file."""
    sources = [HERE / program, Path(__file__), *(ROOT / "proto").glob("*.proto")]
    return not target.exists() or target.stat().st_mtime < max(s.stat().st_mtime for s in sources)


def _go() -> Client:
    library = _GO_LIBRARIES / "src/google.golang.org/grpc"
    debian = "golang-go golang-google-grpc-dev golang-goprotobuf-dev protobuf-compiler"
    _need(debian, "go", "protoc", "protoc-gen-go", library)
    target, source = BUILD / "bin/client-go", BUILD / "go/src/interop/inference"
    if _stale(target, "client.go"):
        # The plugin of this age writes the calls as well, and knows import paths from M alone.
        names = ("grpc_service", "model_config")
        mapped = ",".join(f"M{name}.proto=interop/inference" for name in names)
        options = f"plugins=grpc,paths=source_relative,import_path=interop/inference,{mapped}"
        _protoc(source, f"--go_out={options}:{source}", common=False)
        paths = {"GO111MODULE": "off", "GOPATH": f"{BUILD / 'go'}:{_GO_LIBRARIES}"}
        paths["GOCACHE"] = str(BUILD / "go-cache")
        _run("go", "build", "-o", target, HERE / "client.go", **paths)
    return Client((str(target),))


def _cpp() -> Client:
    _need("g++ pkg-config libgrpc++-dev protobuf-compiler-grpc", "g++", "pkg-config")
    folder, target = BUILD / "cpp", BUILD / "bin/client-cpp"
    if _stale(target, "client.cc"):
        plugin = f"--plugin=protoc-gen-grpc={shutil.which('grpc_cpp_plugin')}"
        _protoc(folder, f"--cpp_out={folder}", f"--grpc_out={folder}", plugin)
        flags = ("pkg-config", "--cflags", "--libs", "grpc++", "protobuf")
        asked = subprocess.run(flags, capture_output=True, text=True, timeout=_BUILD_S)
        if asked.returncode:
            raise Missing("libgrpc++ is missing: apt-get install libgrpc++-dev")
        sources = [HERE / "client.cc", *sorted(folder.rglob("*.cc"))]
        target.parent.mkdir(exist_ok=True)
        include = f"-I{folder}"
        _run("g++", "-std=c++17", "-o", target, include, *sources, *asked.stdout.split())
    return Client((str(target),))


def _ruby() -> Client:
    _need("ruby-grpc protobuf-compiler-grpc", "ruby", "grpc_ruby_plugin")
    folder = BUILD / "ruby"
    plugin = f"--plugin=protoc-gen-grpc={shutil.which('grpc_ruby_plugin')}"
    _protoc(folder, f"--ruby_out={folder}", f"--grpc_out={folder}", plugin)
    return Client(("ruby", f"-I{folder}", str(HERE / "client.rb")))


def _java() -> Client:
    debian = "default-jdk-headless libgrpc-java libprotobuf-java libnetty-java libperfmark-java"
    debian += " libgoogle-gson-java libgeronimo-annotation-1.3-spec-java"
    debian += " protobuf-compiler-grpc-java-plugin"
    jars = [_JARS / f"{name}.jar" for name in ("grpc-api", "protobuf", "netty-common")]
    _need(debian, "javac", "grpc_java_plugin", *jars)
    folder, classes = BUILD / "java", BUILD / "java-classes"
    path = ":".join(str(_JARS / f"{name}.jar") for name in _JAVA_LIBRARIES)
    if _stale(classes / "Client.class", "Client.java"):
        plugin = f"--plugin=protoc-gen-grpc-java={shutil.which('grpc_java_plugin')}"
        _protoc(folder, f"--java_out={folder}", f"--grpc-java_out={folder}", plugin)
        sources = [HERE / "Client.java", *folder.rglob("*.java")]
        _run("javac", "-nowarn", "-proc:none", "-cp", path, "-d", classes, *sources)
    return Client(("java", "-cp", f"{classes}:{path}", "Client"))


def _node() -> Client:
    if not NODE_PACKAGES.is_dir():
        raise Missing("grpc-js is missing: make test-node, with Node.js and npm")
    environ = {"NODE_PATH": str(NODE_PACKAGES), "PROTO_PATH": str(ROOT / "proto")}
    return Client(("node", str(HERE / "client.js")), environ)


CLIENTS: dict[str, Callable[[], Client]] = {
    "grpcio": _grpcio,
    "grpclib": _grpclib,
    "go": _go,
    "c++": _cpp,
    "ruby": _ruby,
    "java": _java,
    "node": _node,
}
