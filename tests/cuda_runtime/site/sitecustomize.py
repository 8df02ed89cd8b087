"""Let CuPy run over the stand-in. Python imports this module because its folder is on PYTHONPATH.

CuPy's modules contain CUDA's runtime, linked statically, so no library of ours could replace it.
Instead, each `cuda...` function in a CuPy module is patched, after loading and before the module
runs, to jump to the stand-in's function of that name. CuPy's own code is unchanged. Functions that
the stand-in lacks return "not supported".
"""

import ctypes
import importlib.util
import mmap
import os
import struct
import sys
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

LINKED = (  # CuPy 14: modules with symbols of libcudart_static.a
    "cupy_backends.cuda.api.runtime",
    "cupy.cuda.cub",
    "cupy.cuda.jitify",
    "cupy.cuda.thrust",
    "cupy.random._generator_api",
)
IN_PART = ("cupy_backends.cuda.libs.cublas",)
OWN = frozenset({"cudaGetErrorName", "cudaGetErrorString", "cudaRuntimeGetVersion"})  # stay
FAKE = Path(__file__).parents[2] / "fake_cuda"
# From the fake: NVML, which the stand-in lacks, and `cuda.bindings`, whose modules have no
# symbols.
FAKES = ("pynvml", "fake_devices")
JUMP = struct.Struct("<HQH")  # mov rax, ADDRESS; jmp rax
_FUNCTION, _SYMBOLS = 2, 2  # STT_FUNC, SHT_SYMTAB


def functions(path: str) -> dict[str, int]:
    """Return the functions named cuda... in a library's symbol table, with their offsets."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as elf:
        start, size, count = (
            *struct.unpack_from("<Q", elf, 40),
            *struct.unpack_from("<HH", elf, 58),
        )
        sections = [struct.unpack_from("<IIQQQQIIQQ", elf, start + k * size) for k in range(count)]
        found: dict[str, int] = {}
        for section in (one for one in sections if one[1] == _SYMBOLS):
            names = sections[section[6]][4]
            table = elf[section[4] : section[4] + section[5]]
            for name, info, _, index, value, _ in struct.iter_unpack("<IBBHQQ", table):
                if (
                    info & 15 == _FUNCTION
                    and index
                    and elf[names + name : names + name + 4] == b"cuda"
                ):
                    text = elf[names + name : elf.find(b"\0", names + name)].decode()
                    if text[4:5].isupper():
                        found[text] = value
        return found


def base_of(path: str) -> int:
    """Where a library is loaded."""
    real = os.path.realpath(path)
    for line in Path("/proc/self/maps").read_text().splitlines():
        parts = line.split(maxsplit=5)
        if len(parts) == 6 and parts[5] == real and int(parts[2], 16) == 0:
            return int(parts[0].partition("-")[0], 16)
    raise ImportError(f"{path} is not loaded")


def redirect(path: str) -> None:
    """Make the functions of a library, which is loaded, jump to the stand-in's."""
    ours, libc, base = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(None), base_of(path)
    places = {n: base + offset for n, offset in functions(path).items() if n not in OWN}
    if not places:
        raise ImportError(f"{path} has no symbols of CUDA's runtime: not the CuPy that is known")
    low = min(places.values()) & -mmap.PAGESIZE
    length = max(places.values()) + mmap.PAGESIZE - low
    if libc.mprotect(ctypes.c_void_p(low), ctypes.c_size_t(length), 7):
        raise ImportError("code cannot be made writable here")
    for name, place in places.items():
        function = getattr(ours, name, None) or ours.standin_missing
        address = ctypes.cast(function, ctypes.c_void_p).value
        ctypes.memmove(place, JUMP.pack(0xB848, address, 0xE0FF), JUMP.size)
    libc.mprotect(ctypes.c_void_p(low), ctypes.c_size_t(length), 5)


class _Loader(ExtensionFileLoader):
    def create_module(self, spec: ModuleSpec) -> Any:
        library = ctypes.CDLL(self.path, mode=os.RTLD_LOCAL | os.RTLD_NOW)
        redirect(self.path)
        module = super().create_module(spec)
        del library
        return module


class _LazyLoader(ExtensionFileLoader):
    """Loader for a module that needs a library of which only a part exists."""

    def create_module(self, spec: ModuleSpec) -> Any:
        flags = sys.getdlopenflags()
        sys.setdlopenflags(os.RTLD_LAZY)
        try:
            return super().create_module(spec)
        finally:
            sys.setdlopenflags(flags)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name in FAKES:
            return importlib.util.spec_from_file_location(name, FAKE / f"{name}.py")
        if name == "cuda.bindings":
            folder = FAKE / "cuda" / "bindings"
            return importlib.util.spec_from_file_location(
                name, folder / "__init__.py", submodule_search_locations=[str(folder)]
            )
        loader = _Loader if name in LINKED else _LazyLoader if name in IN_PART else None
        if loader is None:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, ExtensionFileLoader):
            spec.loader = loader(name, spec.loader.path)
        return spec


sys.meta_path.insert(0, _Finder)
