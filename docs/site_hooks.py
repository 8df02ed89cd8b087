"""What `mkdocs build` needs besides: documents that lie outside of this folder, links to files
that are no documents, the OpenAPI document, and a look whether a page asks for anything from
elsewhere."""

from __future__ import annotations

import re
from os.path import normpath, relpath
from pathlib import Path
from typing import Any

from falcon.testing import TestClient
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

from shmserve.config import Settings
from shmserve.frontends.http.routes.application import create_app
from shmserve.testing import fake_models

ROOT = Path(__file__).parents[1]
# Paths in the repository, and what their pages are called on the site
OUTSIDE = {
    "README.md": "index.md",
    "SECURITY.md": "promises.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGES.md": "changes.md",
    "bench/README.md": "benchmarks.md",
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
    """Raises PluginError: the page would fetch something from another host."""
    if found := _FETCHED.search(output):
        raise PluginError(f"{page.file.src_uri} asks for something from elsewhere: {found[0]}")
    return output
