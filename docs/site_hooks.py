"""Hooks of `mkdocs build`: add the documents that lie outside of this folder and the OpenAPI
document, rewrite links to files that are not documents, send readers of moved sections on, and
refuse pages that would fetch anything from another host."""

import json
import re
from os.path import normpath, relpath
from pathlib import Path
from typing import Any

from falcon.testing import TestClient
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from shmserve.config import Settings
from shmserve.frontends.http.routes.application import create_app
from tests import fake_models

ROOT = Path(__file__).parents[1]
# Paths in the repository, and what their pages are called on the site
OUTSIDE = {
    "README.md": "index.md",
    "SECURITY.md": "promises.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGES.md": "changes.md",
    "bench/README.md": "benchmarks.md",
}
# Old page -> section -> new page, with "#section" where that has another name: readers of the old
# address are sent on
MOVED = {
    "ARCHITECTURE.md": {
        "1-processes": "ARCHITECTURE.md#processes",
        "2-planes": "ARCHITECTURE.md#in-ten-minutes",
        "3-memory": "ARCHITECTURE.md#memory",
        "4-registry": "ARCHITECTURE.md#registry",
        "6-invariants": "ARCHITECTURE.md#invariants",
        "7-where-things-live": "ARCHITECTURE.md#where-to-change-what",
        "a-models-revisions": "ARCHITECTURE.md#registry",
        "a-slots-life": "ARCHITECTURE.md#memory",
        "an-instances-life": "ARCHITECTURE.md#registry",
        "cuda-regions": "ARCHITECTURE.md#regions-client-memory",
        "messages": "messages.md#messages-between-processes",
        "the-first-page": "ARCHITECTURE.md#in-ten-minutes",
    },
    "cli.md": {"who-is-who": "cli.md#process-names"},
    "client.md": {
        "lanes": "shared_memory.md",
        "the-client-sockets-protocol": "lane_wire.md#the-client-socket",
        "the-wire": "lane_wire.md#the-wire-of-lanes",
    },
    "compatibility.md": {
        "answers": "http_api.md",
        "decoupled-models": "model_config.md",
        "ensembles": "model_config.md",
        "generate-and-generate_stream": "http_api.md",
        "grpc": "grpc_api.md#the-service",
        "grps": "grps.md#what-grps-clients-find",
        "host-policies": "model_config.md",
        "how-payloads-meet-workers": "grps.md",
        "http": "http_api.md#what-is-there",
        "model-control": "http_api.md",
        "model-repositories": "model_config.md",
        "modelinfer-messages": "grpc_api.md",
        "modelstreaminfer": "grpc_api.md",
        "onnx-models": "model_config.md",
        "rate-limiter": "model_config.md",
        "requests": "http_api.md",
        "response-cache": "model_config.md",
        "restricted-apis-and-forwarded-headers": "http_api.md",
        "sequences": "model_config.md",
        "shared-memory-regions": "shared_memory.md",
        "statistics-metrics-traces-logs": "http_api.md#what-is-there",
        "torchscript-models": "model_config.md",
        "what-is-there": "http_api.md",
        "where-grpss-servers-differ-or-we-differ-from-them": "grps.md",
        "which-model": "grps.md",
    },
    "dashboard.md": {"safety": "dashboard.md#restrict-it"},
    "from_mlserver.md": {"a-model-of-mlservers": "from_mlserver.md#rewrite-a-model-of-mlservers"},
    "from_triton.md": {
        "first-ask": "from_triton.md#check-the-repository",
        "then-a-client-unchanged": "from_triton.md#run-a-client-unchanged",
        "then-the-options": "from_triton.md#translate-the-options",
        "what-will-look-different": "from_triton.md#what-behaves-differently",
    },
    "index.md": {"two-commands": "index.md#begin"},
    "operations.md": {
        "a-new-version-of-the-server": "reload.md",
        "models-settings-versions": "reload.md#a-model",
        "monitoring": "monitoring.md#what-to-look-at",
    },
    "performance.md": {
        "what-it-costs": "performance.md#what-shmserve-costs",
        "when-not-to-use-this-server": "performance.md#when-not-to-use-shmserve",
        "where-it-pays": "performance.md#where-shmserve-is-faster",
    },
    "python_models.md": {"tritons-public-models": "compatibility.md#python-models"},
    "remote_models.md": {"a-second-node": "benchmarks.md#results-starting-and-resting"},
    "scale.md": {"from-one-host-to-a-thousand-in-steps": "scale.md#which-setup-for-how-many-hosts"},
    "security.md": {
        "keys": "keys.md",
        "tls": "keys.md",
        "what-is-told-to-a-collector": "security.md#what-the-server-sends-elsewhere",
    },
    "shared_memory.md": {
        "streams-on-a-lane": "lane_wire.md#streams",
        "the-client-sockets-protocol": "lane_wire.md#the-client-socket",
        "the-wire": "lane_wire.md#the-wire-of-lanes",
    },
    "statistics.md": {"who-counts-what": "statistics.md#what-is-counted"},
    "tutorial.md": {"what-is-going-on-in-there": "tutorial.md#see-what-the-server-does"},
}
_NAMES = {page: path for path, page in OUTSIDE.items()}
_LINK = re.compile(r"(!?)\[([^]]*)\]\(([^)#:\s]*)(#[^)\s]*)?\)")
_FETCHED = re.compile(r'<(?:script|img|iframe|source|link)[^>]+(?:src|href)="?(?:https?:)?//[^>]*')


def on_files(files: Files, config: Any, **_: Any) -> Files:
    for path, page in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text()))
    api = TestClient(
        create_app(fake_models.dispatcher(), Settings()), headers={"Host": "localhost"}
    )
    text = api.simulate_get("/openapi.json").text
    files.append(File.generated(config, "openapi.json", content=text))
    for picture in (ROOT / "bench/results").glob("*.svg"):
        files.append(File.generated(config, f"results/{picture.name}", abs_src_path=str(picture)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    here = Path(_NAMES.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent

    def moved(link: re.Match[str]) -> str:
        picture, text, target, anchor = link.groups()
        if not target:
            return link[0]
        path = normpath(here / target)
        if path.startswith("bench/results/"):
            path = relpath(path, "bench")
        elif path in OUTSIDE:
            path = OUTSIDE[path]
        elif path.startswith("docs/"):
            path = relpath(path, "docs")
        else:
            return text  # a file of the repository, which the site has not
        return f"{picture}[{text}]({path}{anchor or ''})"

    return _LINK.sub(moved, markdown)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Return the page with the addresses of its moved sections.

    Raises PluginError: the page would fetch something from another host.
    """
    if found := _FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri} asks for something from elsewhere: {found[0]}")
    moved = MOVED.get(page.file.src_uri)
    if moved is None:
        return output
    moved = {old: "{}.html#{}".format(*_target(old, new)) for old, new in moved.items()}
    follow = f"const to={json.dumps(moved)}[location.hash.slice(1)];if(to)location.replace(to)"
    return output.replace("</body>", f"<script>{follow}</script></body>")


def on_post_build(config: Any, **_: Any) -> None:
    """Raises PluginError: a moved section's new address is no section of the site, or the section
    has come back to its old page."""
    site = Path(config.site_dir)
    for old_page, moved in MOVED.items():
        text = (site / old_page).with_suffix(".html").read_text()
        for old, new in moved.items():
            if f'id="{old}"' in text:
                raise PluginError(f"MOVED in docs/site_hooks.py: {old_page} has a section {old}")
            page, section = _target(old, new)
            if f'id="{section}"' not in (site / f"{page}.html").read_text():
                raise PluginError(f"MOVED in docs/site_hooks.py: {new} has no section {section}")


def _target(old_section: str, new: str) -> tuple[str, str]:
    """Return the new page's name, without its ending, and the section there."""
    page, _, section = new.partition("#")
    return page.removesuffix(".md"), section or old_section
