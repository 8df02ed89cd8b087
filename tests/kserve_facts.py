"""Fields of objects of KServe and Kubernetes: `python -m tests.kserve_facts SITE_PACKAGES`.

Writes tests/kserve_facts.json from the models in the packages `kserve` and `kubernetes`: names and
types of the fields, and required fields, of the kinds that deploy/kserve/ uses. The packages' code
is read, not run, because running needs more than 400 MB of other packages.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

FACTS = Path(__file__).with_suffix(".json")
ROOTS = {
    "ClusterServingRuntime": "V1alpha1ClusterServingRuntime",
    "InferenceService": "V1beta1InferenceService",
    "TrainedModel": "V1alpha1TrainedModel",
}
# Left out, with all kinds that only these fields lead to, because nothing here has such fields
_UNUSED = {"status", "explainer", "transformer", "affinity", "managedFields", "ephemeralContainers"}
_FOLDERS = ("kserve/models", "kubernetes/client/models")
_REQUIRED = re.compile(r"Invalid value for `(\w+)`, must not be `None`")

Facts = dict[str, dict[str, Any]]


def gather(site: Path) -> Facts:
    """Return kind -> fields (name -> type) and required fields.

    A type is a kind, a plain type, or `list:` or `dict:` of a type.
    """
    found: Facts = {}
    ahead = list(ROOTS.values())
    while ahead:
        kind = ahead.pop()
        source = _source(site, kind) if kind not in found else None
        if source is None:
            continue
        types, names = _dict(source, "openapi_types"), _dict(source, "attribute_map")
        fields = {names[own]: _plain(text) for own, text in types.items()}
        fields = {name: text for name, text in sorted(fields.items()) if name not in _UNUSED}
        required = {names[own] for own in _required(source) & types.keys()} & fields.keys()
        found[kind] = {"fields": fields, "required": sorted(required)}
        ahead += [text.rpartition(":")[2] for text in fields.values()]
    return dict(sorted(found.items()))


def _plain(text: str) -> str:
    inner = re.search(r"(\w+)[])]$", text)
    if inner is None:
        return text
    return f"{'list' if text.lower().startswith('list') else 'dict'}:{inner[1]}"


def _required(source: str) -> set[str]:
    """Return required fields, for models generated in the older and in the newer way."""
    found = set(_REQUIRED.findall(source))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            kind = ast.unparse(node.annotation)
            if not kind.startswith(("Optional", "ClassVar")):
                found.add(node.target.id)
    return found


def _source(site: Path, kind: str) -> str | None:
    name = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", kind).lower()
    for folder in _FOLDERS:
        for path in (site / folder).glob(f"{name[:3]}*.py"):
            if path.stem.replace("_", "") == kind.lower():
                return path.read_text()
    return None


def _dict(source: str, name: str) -> dict[str, str]:
    for node in ast.walk(ast.parse(source)):
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, ast.Assign | ast.AnnAssign) and getattr(targets[0], "id", "") == name:
            assert node.value is not None
            found: dict[str, str] = ast.literal_eval(node.value)
            return found
    raise LookupError(name)


if __name__ == "__main__":
    kinds = gather(Path(sys.argv[1])).items()
    lines = [f"{json.dumps(kind)}: {json.dumps(facts)}" for kind, facts in kinds]
    FACTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
