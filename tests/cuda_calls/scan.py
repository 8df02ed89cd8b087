"""CUDA calls of the product: every name of CuPy, CUDA's driver, NVML, torch and ONNX Runtime.

Found by reading the source. A value is followed from the import of a library through local names,
attributes (of any object: `self._runtime` in one file equals `_runtime` of another object) and
arguments of the package's own functions, and reported as a dotted path,
`cupy.cuda.runtime.malloc`. Arrays and events that come in as `Any` cannot be followed: `NAMED`
names them.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "shmserve"
# Files without any of these words need not be read
MENTIONS = re.compile(r"cupy|cuda|nvml|torch|onnxruntime|\bxp\b|on_device")
NOT_SERVED = "shmserve/_generated"

LIBRARIES = ("cupy", "libcuda", "pynvml", "torch", "onnxruntime")
# Calls whose result is a library, whichever object the call is made on
SOURCES = {
    "runtime.cupy": "cupy",
    "device_arrays.cupy": "cupy",
    "nvml.bindings": "pynvml",
    "import_torch": "torch",
}
CALLS_LATER = {"partial": 0, "weakref.finalize": 1}  # which argument is the function
ARRAY, STREAM, EVENT = "cupy.ndarray", "cupy.cuda.Stream", "cupy.cuda.Event"
DEVICE, MEMORY, POINTER = (f"cupy.cuda.{n}" for n in ("Device", "UnownedMemory", "MemoryPointer"))
MADE_BY = ("empty", "asarray", "arange", "from_dlpack", "ascontiguousarray", "ndarray",
           "ndarray.copy", "ndarray.reshape")  # fmt: skip
RESULTS = {
    **{f"cupy.{name}()": ARRAY for name in MADE_BY},
    f"{ARRAY}.device": DEVICE,
    f"{ARRAY}.data": POINTER,
    f"{STREAM}()": STREAM,
    f"{STREAM}.null": STREAM,
    f"{STREAM}.record()": EVENT,
    "cupy.cuda.get_current_stream()": STREAM,
    f"{EVENT}()": EVENT,
    f"{DEVICE}()": DEVICE,
    f"{MEMORY}()": MEMORY,
    f"{POINTER}()": POINTER,
    "cupy.get_default_memory_pool()": "cupy.cuda.MemoryPool",
}
WITH_DEVICE_ARRAYS = (
    "shmserve/cuda/device.py",
    "shmserve/client/memory/device_arrays.py",
    "shmserve/client/memory/device_blocks.py",
    "shmserve/executor/tensors/cuda_region.py",
    "shmserve/executor/backends/dlpack.py",
    "shmserve/executor/backends/onnx/tensor_places.py",
    "shmserve/executor/wrappers/sequence_backend.py",
)
OF_NUMPY = {("cupy.ndarray.copy", "shmserve/executor/wrappers/sequence_backend.py")}
OWN_ARRAYS = {("shmserve/executor/process/call_tensors.py", "_array")}  # attributes
NAMED = {**dict.fromkeys(("array", "source", "target"), ARRAY), "event": EVENT}  # parameters
# Attributes that numpy's arrays have in the same form; no CUDA call happens
OF_ANY_ARRAY = re.compile("shape|dtype|nbytes|itemsize|strides|flags|ndim|size|__array")
ONLY_WAYS = {*LIBRARIES, "cupy.cuda", "cupy.cuda.runtime", "cupy.cuda.driver", "torch.cuda"}
WORTH_KNOWING = {*ONLY_WAYS, STREAM, "cupy.empty"}  # attributes of objects
ANYWHERE = ""  # an attribute of any object in any file
OF_ORT = ("get_available_providers", "preload_dlls", "InferenceSession")
OF_TORCH = ("torch.cuda", "torch.from_dlpack", "torch.backends.cudnn")


@dataclass(frozen=True, order=True)
class Site:
    """Where a name is used."""

    name: str
    file: str
    line: int


@dataclass
class Known:
    """Facts learned so far: attributes of objects, and parameters of functions."""

    attributes: dict[tuple[str, str], str] = field(default_factory=dict)
    results: dict[tuple[str, str], str] = field(default_factory=dict)
    parameters: dict[tuple[str, str, str], str] = field(default_factory=dict)
    functions: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    homes: dict[str, list[tuple[str, str]]] = field(default_factory=dict)  # by a function's name

    def size(self) -> int:
        return len(self.attributes) + len(self.results) + len(self.parameters)


def dotted(node: ast.expr) -> str:
    """Return `a.b.c` as written, or "" for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (base := dotted(node.value)):
        return f"{base}.{node.attr}"
    return ""


class Reader(ast.NodeVisitor):
    """Reader of one file. `sites` are the uses found so far, based on `known`."""

    def __init__(self, file: str, known: Known) -> None:
        self.file = file
        self.known = known
        self.sites: set[Site] = set()
        self._class = self._function = ""
        self._line = 0
        self._scopes: list[dict[str, str]] = [{}]

    def visit(self, node: ast.AST) -> None:
        """Report a use by the first line of its statement, as coverage does."""
        before = self._line
        if isinstance(node, (ast.stmt, ast.excepthandler)):
            self._line = node.lineno
        super().visit(node)
        self._line = before

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        scope = {}
        for arg in (*node.args.args, *node.args.kwonlyargs):
            name = self._class if node.name == "__init__" else node.name
            learned = self.known.parameters.get((self.file, name, arg.arg))
            if path := learned or self._declared(arg):
                scope[arg.arg] = path
        before, self._function = self._function, node.name
        self._scopes.append(scope)
        self.generic_visit(node)
        self._scopes.pop()
        self._function = before

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        before, self._class = self._class, node.name
        self.generic_visit(node)
        self._class = before

    def visit_Return(self, node: ast.Return) -> None:
        self.generic_visit(node)
        path = self.path(node.value) if node.value is not None else ""
        if path in (ARRAY, STREAM):
            self.known.results.setdefault((self.file, self._function), path)
        if path in LIBRARIES and self._class:  # a property
            self.known.attributes.setdefault((ANYWHERE, self._function), path)

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if alias.name in LIBRARIES:
                self._scopes[-1][alias.asname or alias.name] = alias.name

    def visit_Assign(self, node: ast.Assign | ast.NamedExpr | ast.AnnAssign) -> None:
        self.generic_visit(node)
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if node.value is not None:
                self._bind(target, node.value)

    visit_NamedExpr = visit_AnnAssign = visit_Assign

    def visit_With(self, node: ast.With) -> None:
        for item in node.items:
            path = self.path(item.context_expr)
            if path in (DEVICE, STREAM):  # counts even without a call, because `with` enters it
                self._found(f"{path}.__enter__")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        self._pass_on(node.func, node.args, node.keywords)
        if (first := CALLS_LATER.get(dotted(node.func))) is not None:
            self._pass_on(node.args[first], node.args[first + 1 :], node.keywords)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Count the whole of `cupy.cuda.Stream.null.record`, and no part of the path."""
        path = self.path(node, raw=True)
        if path.rpartition(".")[2] == node.attr:
            self._found(path)
        value = node.value
        while isinstance(value, ast.Attribute):
            value = value.value
        self.visit(value)

    # ------------------------------------------------------------------- paths

    def path(self, node: ast.expr, raw: bool = False) -> str:
        """Return the path of a library's value, or "". `raw`: as written, not the result's type."""
        told = self._told(node)
        return told if raw else RESULTS.get(told, told)

    def _told(self, node: ast.expr) -> str:
        if isinstance(node, ast.Name):
            return next((s[node.id] for s in reversed(self._scopes) if s.get(node.id)), "")
        if isinstance(node, ast.BoolOp):
            return next(filter(None, map(self.path, node.values)), "")
        if isinstance(node, ast.IfExp):
            return self.path(node.body) or self.path(node.orelse)
        if isinstance(node, ast.Call):
            return self._result(node)
        if isinstance(node, ast.Attribute):
            base, a = self.path(node.value), self.known.attributes
            if base:
                return f"{base}.{node.attr}"
            homes = (self.file, ANYWHERE)
            return next((a[h, node.attr] for h in homes if (h, node.attr) in a), "")
        return ""

    def _result(self, node: ast.Call) -> str:
        written = dotted(node.func)
        if written in SOURCES:
            return SOURCES[written]
        if (self.file, written) in self.known.results:
            return self.known.results[self.file, written]
        if written == "cupy" and not self.path(node.func):
            return "cupy"
        first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else ""
        if written in ("sys.modules.get", "import_extra") and first in LIBRARIES:
            return str(first)
        if written == "ctypes.CDLL" and first == "libcuda.so.1":
            return "libcuda"
        base = self.path(node.func)
        return f"{base}()" if base else ""

    def _declared(self, arg: ast.arg) -> str:
        is_any = dotted(arg.annotation or ast.Constant(0)) == "Any"
        return NAMED.get(arg.arg, "") if is_any and self.file in WITH_DEVICE_ARRAYS else ""

    # ---------------------------------------------------------------- learning

    def _bind(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for part, given in zip(target.elts, value.elts, strict=True):
                self._bind(part, given)
            return
        path = self.path(value)
        if isinstance(target, ast.Name):
            self._scopes[-1][target.id] = path
        elif path in WORTH_KNOWING and isinstance(target, ast.Attribute):
            home = ANYWHERE if path in ONLY_WAYS else self.file
            self.known.attributes.setdefault((home, target.attr), path)

    def _pass_on(
        self, function: ast.expr, args: list[ast.expr], keywords: list[ast.keyword]
    ) -> None:
        name = dotted(function).rpartition(".")[2]
        own = (self.file, name)
        homes = [own] if own in self.known.functions else self.known.homes.get(name, [])
        for home in homes:
            names = self.known.functions[home]
            given = [*zip(names, args, strict=False), *((k.arg or "", k.value) for k in keywords)]
            for parameter, value in given:
                if (path := self.path(value)) in (*ONLY_WAYS, STREAM):
                    self.known.parameters.setdefault((*home, parameter), path)

    def _found(self, path: str) -> None:
        name = path.replace("()", "")
        library, last = name.partition(".")[0], name.rpartition(".")[2]
        if name in ONLY_WAYS or library not in LIBRARIES:
            return
        if library == "onnxruntime" and last not in OF_ORT:
            return
        if library == "torch" and not name.startswith(OF_TORCH):
            return
        if OF_ANY_ARRAY.match(name.removeprefix(f"{ARRAY}.")) or (name, self.file) in OF_NUMPY:
            return
        self.sites.add(Site(name, self.file, self._line))


def files() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name, text = str(path.relative_to(ROOT)), path.read_text()
        if not name.startswith(NOT_SERVED) and MENTIONS.search(text):
            yield name, ast.parse(text)


def functions(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """Yield functions, and classes by name, with their parameters except `self`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            names = [arg.arg for arg in node.args.args]
            yield node.name, [name for name in names if name not in ("self", "cls")]
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                    yield node.name, [arg.arg for arg in part.args.args[1:]]


def sites() -> list[Site]:
    """All of the product's."""
    trees = dict(files())
    known = Known(dict.fromkeys(OWN_ARRAYS, ARRAY))
    for file, tree in trees.items():
        for name, names in functions(tree):
            known.functions[file, name] = names
            known.homes.setdefault(name, []).append((file, name))
    size = -1
    while size != known.size():
        size = known.size()
        found: set[Site] = set()
        for name, tree in trees.items():
            reader = Reader(name, known)
            reader.visit(tree)
            found |= reader.sites
    return sorted(found)
