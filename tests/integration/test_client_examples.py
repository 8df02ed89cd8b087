"""The C library's examples and its header for C++, built as users build them, against a server."""

import os
import re
import subprocess
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.c_programs import LIBRARY, MEMORY, STRICT, cc, run, sanitizer
from tests.running_server import ROOT, WATCHDOG_S
from tests.servers import SMALL, Server, only

MODELS = "workers,tests/repositories/basic,tests/repositories/streams"
STRICT_CPP = ("-std=c++17", *STRICT[1:], "-Wpedantic")
COMPILERS = ["g++", pytest.param("clang++", marks=pytest.mark.needs("clang"))]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    names = "identity,identity_bytes,digits,repeat_int32,pair,misbehaving,teller"
    with Server(MODELS, **only(names), **SMALL) as server:
        server.wait_instances()
        yield server


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library's object, with sanitizers as far as the compiler has them."""
    built = tmp_path_factory.mktemp("library") / "shmserve.o"
    cc(*STRICT, *sanitizer(MEMORY), "-c", "-o", built, LIBRARY / "shmserve.c")
    return built


@pytest.mark.parametrize(
    ("example", "arguments", "line"),
    [
        ("hello.c", (), r"a \d"),
        ("frames.c", ("20", "50"), r"done=\d+ late=\d+"),
        ("threads.cpp", ("4", "50"), "right=200"),
        ("poll_loop.c", ("100",), "right=100 sum=150"),
    ],
)
def test_an_example(
    server: Server, library: Path, tmp_path: Path, example: str, arguments: tuple[str], line: str
) -> None:
    cpp = example.endswith("pp")
    source = LIBRARY / "examples" / example
    strict, compiler = (STRICT_CPP, "g++") if cpp else (STRICT, "cc")
    flags = (*sanitizer(MEMORY), f"-I{LIBRARY}")
    cc(*strict, *flags, "-o", tmp_path / "example", source, library, compiler=compiler)
    environ = {**os.environ, "SHMSERVE_RUN_DIR": server.run_dir}
    (printed,) = run(tmp_path / "example", *arguments, environ=environ)
    assert re.fullmatch(line, printed), printed
    if example == "frames.c":
        assert sum(map(int, re.findall(r"\d+", printed))) == 20


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_header_for_cpp(server: Server, tmp_path: Path, compiler: str) -> None:
    flags = sanitizer(MEMORY) if compiler == "g++" else ()
    built = [tmp_path / name for name in ("shmserve.o", "checks")]
    cc(*STRICT, *flags, "-c", "-o", built[0], LIBRARY / "shmserve.c")
    checks = LIBRARY / "tests/checks.cpp"
    cc(*STRICT_CPP, *flags, "-o", built[1], checks, built[0], compiler=compiler)
    assert run(built[1], f"{server.run_dir}/client.sock") == ["ok"]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_header_works_without_exceptions(tmp_path: Path, compiler: str) -> None:
    source = tmp_path / "none.cpp"
    body = 'shmserve::Lane lane(shmserve::Client &c) { return c.lane("m"); }'
    source.write_text(f'#include "shmserve.hpp"\n{body}\n')
    flags = (*STRICT_CPP, "-fno-exceptions", f"-I{LIBRARY}")
    cc(*flags, "-c", "-o", tmp_path / "none.o", source, compiler=compiler)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_parameter_that_need_not_fit_says_so(tmp_path: Path, compiler: str) -> None:
    source = tmp_path / "large.cpp"
    body = 'void f(shmserve::Request &r, std::uint64_t n) { r.parameter("n", n); }'
    source.write_text(f'#include "shmserve.hpp"\n{body}\n')
    with pytest.raises(AssertionError, match="convert the value"):
        cc("-std=c++17", f"-I{LIBRARY}", "-fsyntax-only", source, compiler=compiler)


def test_the_first_call_of_the_page(server: Server, tmp_path: Path) -> None:
    """In C as the page types it, and the program in C++ that it shows."""
    page = (ROOT / "docs/client_c.md").read_text()
    (tmp_path / "client").symlink_to(ROOT / "client")
    (program,) = re.findall(r"^    #include <cstdio>\n(?:    .*\n|\n)*?    }$", page, re.MULTILINE)
    (tmp_path / "hello.cpp").write_text(textwrap.dedent(program))
    typed = re.findall(r"^    ((?:cc|c\+\+) .*|\./hello.*)$", page, re.MULTILINE)
    environ = {**os.environ, "SHMSERVE_RUN_DIR": server.run_dir}
    in_c, in_cpp = run("sh", "-ec", "\n".join([f"cd {tmp_path}", *typed]), environ=environ)
    assert in_c == in_cpp


@pytest.mark.parametrize("compiler", COMPILERS)
def test_the_library_compiled_as_cpp_says_what_to_do(compiler: str) -> None:
    command = [compiler, "-std=c++17", "-fsyntax-only", str(LIBRARY / "shmserve.c")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WATCHDOG_S, check=False)
    assert done.returncode
    assert "compile it with cc -c" in done.stderr


def test_the_page_names_all_of_the_library() -> None:
    page = (ROOT / "docs/client_c.md").read_text()
    header = (LIBRARY / "shmserve.h").read_text()
    names = set(re.findall(r"\b(shmserve_\w+)\(", header)) | set(
        re.findall(r"^} (shmserve_\w+);", header, re.MULTILINE)
    )
    assert len(names) > 30
    assert {name for name in names if f"`{name}`" not in page} == set()
    classes = set(re.findall(r"^class (\w+)", (LIBRARY / "shmserve.hpp").read_text(), re.MULTILINE))
    assert {name for name in classes if f"`{name}`" not in page} == set()
