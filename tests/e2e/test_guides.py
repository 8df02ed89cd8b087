"""Commands of the documents, typed in a separate folder against one server, which the tutorial's
own command has started."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from shmserve.core.stats.request_counters import Reason
from shmserve.frontends.http.routes.scrape import gpu_metrics
from tests.guide_blocks import ROOT, RUN, Block, blocks, prints
from tests.running_server import WATCHDOG_S, RunningServer
from tests.servers import output

MONITORING = ROOT / "deploy/monitoring"
pytestmark = pytest.mark.timeout(600)  # the first test waits for the tutorial
TUTORIAL = "docs/tutorial.md"
GUIDES = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in ("install", "one_file", "native_models", "http_api", "operations")
    ),
    *(f"docs/from_{name}.md" for name in ("triton", "mlserver", "litserve", "fastapi", "grps")),
    *(f"docs/{name}.md" for name in ("reload", "monitoring", "keys", "slow_requests")),
    *(f"docs/{name}.md" for name in ("troubleshooting", "performance")),
)


class Reader:
    """Reader who types the documents' commands in order, in the environment of one shell.

    Blocks that were typed before are skipped, because documents begin alike. Addresses are
    replaced with addresses of the test's server.
    """

    def __init__(self, folder: Path) -> None:
        self.server = RunningServer(http_workers=1)
        self._folder = folder
        self._done: dict[tuple[str, str], str] = {}
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
        """Type all commands of a document and check the printed output."""
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
                    self._done[key] = self._type(block)
                output = self._done[key]

    def _write(self, block: Block) -> None:
        path = self._folder / block.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self._placed(block.text))

    def _placed(self, text: str) -> str:
        for place, own in self._places.items():
            text = text.replace(place, own)
        return text

    def _type(self, block: Block) -> str:
        """Type a block and return the output, errors included."""
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
            timeout=2 * WATCHDOG_S,
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
    """Reader who has done the tutorial."""
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


def expressions() -> list[str]:
    """Return the Prometheus queries of the alerts and the dashboard."""
    rules = yaml.safe_load((MONITORING / "shmserve.rules.yml").read_text())
    dashboard = json.loads((MONITORING / "shmserve.dashboard.json").read_text())
    asked = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    for panel in dashboard["panels"]:
        asked += [target["expr"] for target in panel.get("targets", ())]
    return [*asked, *(v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query")]


def test_alerts_and_dashboard_ask_for_metrics_that_are_there(reader: Reader) -> None:
    _, _, text = reader.server.request("GET", "/metrics")
    there = set(re.findall(r"^# TYPE (\w+)", text.decode(), re.MULTILINE))
    there |= {f"{name}_bucket" for name in there}
    gpus = {f"shmserve_gpu_{value.name}" for value in gpu_metrics._VALUES}  # this host has no GPUs
    used = {name for asked in expressions() for name in re.findall(r"shmserve_\w+", asked)}
    assert len(used) > 20
    assert used <= there | gpus
    reasons = re.findall(r'reason=~?"([^"]+)"', " ".join(expressions()))
    assert {name for names in reasons for name in names.split("|")} <= {
        reason.name.lower() for reason in Reason
    }


def test_monitoring_says_what_to_do_about_every_alert() -> None:
    rules = yaml.safe_load((MONITORING / "shmserve.rules.yml").read_text())
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    told = re.findall(r"^\| (Shmserve\w+) \|", (ROOT / "docs/monitoring.md").read_text(), re.M)
    assert told == alerts


@pytest.mark.needs("promtool")
def test_prometheus_understands_alerts_and_dashboard(tmp_path: Path) -> None:
    asked = [
        re.sub(r"\$__rate_interval", "5m", one) for one in expressions() if "label_" not in one
    ]
    rules = [{"record": f"r:{number}", "expr": one} for number, one in enumerate(asked)]
    every = tmp_path / "dashboard.yml"
    every.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    for path in (MONITORING / "shmserve.rules.yml", every):
        output("promtool", "check", "rules", path)
