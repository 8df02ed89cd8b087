#!/usr/bin/env python3
"""Stand-in for NVRTC: compile a CUDA program into a shared object that runs on the host.

    compile.py FOLDER [--name EXPRESSION]... -- OPTIONS

Reads FOLDER/program.cu, writes FOLDER/code and FOLDER/log. Options unknown to g++ are ignored.
"""

import hashlib
import re
import struct
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
INCLUDE = HERE / "include"
MAGIC = b"standin\0"
# No contraction: a device would give other bits, but the same everywhere.
OPTIONS = (
    "-x", "c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-fpermissive",
    # _FORTIFY_SOURCE forbids longjmp
    "-fno-strict-aliasing", "-ffp-contract=off", "-U_FORTIFY_SOURCE",
    "-include", "standin_device.h", f"-I{INCLUDE}",
)  # fmt: skip
KEPT = ("-I", "-D", "-U", "--include-path=", "--define-macro=")
KERNEL = re.compile(
    r"__global__\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?void\s+"
    r"(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\("
)
DYNAMIC = re.compile(
    r"extern\s+__shared__\s+(?:__align__\s*\(\d+\)\s*)?([\w:<>, ]+?)\s+(\w+)\s*\[\s*\]\s*;"
)


def parameters(source: str, start: int) -> list[str]:
    """Return the parameters of a list whose opening parenthesis is before `start`."""
    depth, found = 1, [""]
    for character in source[start:]:
        depth += (character in "(<[") - (character in ")>]")
        if not depth:
            break
        if character == "," and depth == 1:
            found.append("")
        else:
            found[-1] += character
    return [one.strip() for one in found if one.strip()]


def is_template(source: str, start: int) -> bool:
    before = source[max(0, source.rfind(";", 0, start), source.rfind("}", 0, start)) : start]
    return "template" in before


def entries(source: str, expressions: list[str]) -> str:
    """Return the code that registers each kernel."""
    lines, reads = [], {}
    for match in KERNEL.finditer(source):
        name = match[1]
        told = ", ".join(
            str(int(one.startswith("const "))) for one in parameters(source, match.end())
        )
        reads[name] = told
        if not is_template(source, match.start()):
            lines.append(f'STANDIN_KERNEL({name}, ({name}), "{name}", {{{told}}})')
    for number, expression in enumerate(expressions):
        base = re.sub(r"<.*", "", expression).strip().lstrip("&").rpartition("::")[2]
        lines.append(
            f'STANDIN_KERNEL(expression_{number}, (&{expression.lstrip("& ")}), "{base}",'
            f" {{{reads.get(base, '')}}})"
        )
    return "\n".join(lines)


def fingerprint() -> str:
    """Return a digest that changes with the compiler. CuPy caches compiled kernels by this
    digest."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(INCLUDE.iterdir()):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def main() -> int:
    folder, words = Path(sys.argv[1]), sys.argv[2:]
    options = words[words.index("--") + 1 :]
    expressions = words[1 : words.index("--") : 2]
    source = (folder / "program.cu").read_text()
    if not source.strip():
        (folder / "code").write_text(f"// the stand-in's compiler {fingerprint()}\n")
        return 0
    source = DYNAMIC.sub(r"\1 *const \2 = (\1 *)standin_shared;", source)
    program, made = folder / "host.cc", folder / "host.so"
    text = f'#line 1 "program.cu"\n{source}\n#line 1 "entries"\n{entries(source, expressions)}\n'
    program.write_text(text)
    kept = [option for option in options if option.startswith(KEPT)]
    if re.search(r"__sync(threads|warp)", source):
        kept.append("-DSTANDIN_BARRIERS=true")
    try:
        done = subprocess.run(
            ["g++", *OPTIONS, *kept, program, "-o", made],
            capture_output=True,
            text=True,
            check=False,
        )
        (folder / "log").write_text(done.stderr)
        if not done.returncode:
            code = made.read_bytes()
            (folder / "code").write_bytes(MAGIC + struct.pack("<Q", len(code)) + code)
        return done.returncode
    finally:
        program.unlink()
        made.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
