"""What the documents tell people to type, typed: in a folder of its own, against one server, which
the tutorial's own command has started."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shmserve.testing.running_server import WATCHDOG_S, RunningServer
from tests.guide_blocks import RUN, Block, blocks, prints

TUTORIAL = "docs/tutorial.md"
GUIDES = (
    "README.md",
    *(f"docs/{name}.md" for name in ("install", "native_models", "http_api", "operations")),
    *(f"docs/from_{name}.md" for name in ("triton", "mlserver", "grps")),
    *(f"docs/{name}.md" for name in ("troubleshooting", "performance")),
)


class Reader:
    """Somebody who types what documents say, one after the other, in one shell's environment.

    What was typed before is not typed again: documents begin alike. Addresses are those of a
    server of the test's own.
    """

    def __init__(self, folder: Path) -> None:
        self.server = RunningServer(http_workers=1)
        self._folder = folder
        self._done: set[tuple[str, str]] = set()
        own = {**self.server.environ, "PYTHONWARNINGS": "default"}
        del own["SHMSERVE_MODEL_REPOSITORY"]  # of the settings file
        own["PATH"] = f"{os.path.dirname(sys.executable)}:{own['PATH']}"
        self.server.environ = own
        self._places = {
            "127.0.0.1:8000": f"127.0.0.1:{self.server.http_port}",
            "127.0.0.1:8001": self.server.grpc_address,
            "/run/shmserve": self.server.run_dir,
        }

    def follow(self, document: str) -> None:
        """Do what a document says."""
        output = ""
        for block in blocks(document):
            if block.language == "text":
                missing = prints(block.text, output)
                assert not missing, f"{block.where}: {missing} not in:\n{output}"
            elif block.file:
                self._write(block)
            elif block.language in RUN and not block.not_run:
                key = (block.language, block.text)
                if key not in self._done:
                    output = self._type(block)
                self._done.add(key)

    def _write(self, block: Block) -> None:
        path = self._folder / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._placed(block.text))

    def _placed(self, text: str) -> str:
        for place, own in self._places.items():
            text = text.replace(place, own)
        return text

    def _type(self, block: Block) -> str:
        """Its output, errors included."""
        text = self._placed(block.text)
        if block.mark == "keeps running":
            self._start(text)
            return ""
        words = [sys.executable, "-c"]
        if block.language == "bash":
            words = ["bash", "-euo", "pipefail", "-c"]
            text += "\nexport -p > .exports\n"  # the next block is typed in the same shell
            if (self._folder / ".exports").exists():
                text = f"source .exports\n{text}"
        done = subprocess.run(
            [*words, text],
            cwd=self._folder,
            env=self.server.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=WATCHDOG_S,
        )
        failed = block.mark == "fails"
        assert (done.returncode != 0) is failed, f"{block.where}: {done.stdout[-3000:]}"
        return done.stdout

    def _start(self, text: str) -> None:
        with self.server.log_path.open("ab") as log:
            self.server.master = subprocess.Popen(
                ["bash", "-c", f"exec {text}"],
                cwd=self._folder,
                env=self.server.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """One who has done the tutorial."""
    reader = Reader(tmp_path_factory.mktemp("guides"))
    try:
        reader.follow(TUTORIAL)
        yield reader
        reader.server.stop()
        assert reader.server.leaks() == []
    finally:
        if reader.server.master is not None:
            reader.server.kill_all()


@pytest.mark.needs("curl")
@pytest.mark.parametrize("document", GUIDES)
def test_what_a_guide_says_can_be_typed(reader: Reader, document: str) -> None:
    reader.follow(document)


def test_marks_are_known_and_files_are_in_the_folder() -> None:
    for document in (TUTORIAL, *GUIDES):
        for block in blocks(document):
            known = block.mark in ("", "keeps running", "fails") or block.file or block.not_run
            assert known, f"{block.where}: {block.mark}"
            assert not block.file.startswith(("/", "..")), block.where


def test_blocks_that_are_not_run_are_told() -> None:
    every = [block for document in (TUTORIAL, *GUIDES) for block in blocks(document)]
    left = [f"{block.where} {block.not_run}" for block in every if block.not_run]
    assert len(left) < len([block for block in every if block.language in RUN]) / 2
    pytest.skip(f"not run: {'; '.join(left)}")
