"""Documents that must not drift from the code."""

import ast
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

from shmserve import config
from shmserve.cli.inspecting import settings_reference
from shmserve.protocol.control import client_messages, lane_messages, messages
from shmserve.protocol.control.message import Message

ROOT = Path(__file__).parents[2]


def test_the_reference_of_the_settings_is_what_the_code_has() -> None:
    assert all(setting.description for setting in config.declared().values() if setting.section)
    written = (ROOT / "docs/settings.md").read_text()
    assert written == settings_reference.markdown(), "run: make docs"


def test_settings_that_documents_give_values_exist() -> None:
    given = {
        (name, document.name)
        for document in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
        for name in re.findall(r"`([a-z_]+) = ", document.read_text())
    }
    # settings of other programs
    known = config.declared().keys() | {"ocr", "header_map", "device_tensors"}
    assert len(given) > 20
    assert [pair for pair in given if pair[0] not in known] == []


def test_the_state_machines_are_drawn_as_they_are() -> None:
    done = subprocess.run(
        [sys.executable, "docs/draw.py", "--check"], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 0, "run: python docs/draw.py"


def test_docstrings_cite_invariants_that_exist() -> None:
    architecture = (ROOT / "docs/ARCHITECTURE.md").read_text()
    defined = set(re.findall(r"\*\*I(\d+)\*\*", architecture))
    for path in (ROOT / "shmserve").rglob("*.py"):
        cited = set(re.findall(r"\bI(\d+)\b", path.read_text()))
        assert cited <= defined, path


def test_links_of_the_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_files_that_the_architecture_names_exist() -> None:
    text = (ROOT / "docs/ARCHITECTURE.md").read_text()
    named = set(re.findall(r"`([a-z_\d]+(?:/[a-z_\d]+)*(?:/|/[a-z_\d]+\.py))`", text))
    assert len(named) > 100
    assert {
        p for p in named if not any((root / p).exists() for root in (ROOT / "shmserve", ROOT))
    } == set()


def test_the_architecture_stays_short() -> None:
    # Theory of one file belongs to the head of that file
    assert len((ROOT / "docs/ARCHITECTURE.md").read_text().split()) <= 5000


def _names(cell: str) -> set[str]:
    """Return the message names in a cell. Attachments stand in brackets and are dropped."""
    return {name for name in re.split(r"[\s,]+", re.sub(r"\(.*?\)", "", cell)) if name}


def _channel(sender: str, receiver: str) -> tuple[Any, Any]:
    """Return the unions of messages from sender to receiver and back."""
    if receiver == "coordinator's client socket":
        return client_messages.ToServer, client_messages.FromServer
    if receiver == "coordinator":
        return messages.ToCoordinator, messages.FromCoordinator
    if sender == "coordinator":
        return messages.FromCoordinator, messages.ToCoordinator
    channels = {
        ("frontend", "executor"): (messages.ToExecutor, messages.ToFrontend),
        ("executor", "frontend"): (messages.ToFrontend, messages.ToExecutor),
        ("any local program", "executor"): (lane_messages.ToLane, lane_messages.LaneAnswer),
    }
    return channels[sender, receiver]


def test_the_message_table_is_what_processes_say() -> None:
    text = (ROOT / "docs/messages.md").read_text()
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    listed: dict[Any, set[str]] = {}
    for row in rows[1:]:
        questions, _, replies = row[0].partition(" / ")
        there, back = _channel(*row[1].split(", "))
        listed.setdefault(there, set()).update(_names(questions))
        listed.setdefault(back, set()).update(_names(replies))
    unions = (
        *(messages.ToExecutor, messages.ToFrontend),
        *(messages.ToCoordinator, messages.FromCoordinator),
        *(client_messages.ToServer, client_messages.FromServer),
        *(lane_messages.ToLane, lane_messages.LaneAnswer),
    )
    for union in unions:
        assert listed[union] == {kind.__name__ for kind in get_args(union) or (union,)}


def test_every_message_goes_somewhere() -> None:
    unions = (messages.ToExecutor | messages.ToFrontend | messages.ToCoordinator) | (
        messages.FromCoordinator | client_messages.ToServer | client_messages.FromServer
    )
    unions |= lane_messages.ToLane | lane_messages.LaneAnswer
    kinds = {kind for kind in Message.__subclasses__() if kind.__module__.startswith("shmserve.")}
    assert kinds == set(get_args(unions))


def test_the_wire_of_lanes_is_specified_as_it_is() -> None:
    text = (ROOT / "docs/lane_wire.md").read_text()
    stated = {name: fields for name, fields in re.findall(r'`\["(\w+)", ([\w, ]+)\]`', text)}
    unions = (client_messages.ToServer | client_messages.FromServer) | (
        lane_messages.ToLane | lane_messages.LaneAnswer
    )
    assert stated == {
        str(kind.__struct_config__.tag): ", ".join(kind.__struct_fields__)
        for kind in get_args(unions)
    }
    assert f"**version {client_messages.VERSION}**" in text


def _texts_of_the_code() -> list[str]:
    """Return all strings of the package, with "…" for each placeholder."""
    texts = []
    for path in (ROOT / "shmserve").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [
                    part.value if isinstance(part, ast.Constant) else "…" for part in node.values
                ]
                texts.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(re.sub(r"%\w", "…", node.value))
    return texts


def test_texts_of_the_troubleshooting_are_in_the_code() -> None:
    texts = _texts_of_the_code()
    rows = (ROOT / "docs/troubleshooting.md").read_text().splitlines()
    quoted = [
        re.sub(r" \w+=…", "", text)  # fields of a log line are no text of the code
        for row in rows
        if row.startswith("| `")
        for text in re.findall(r"`([^`]+)`", row.split(" | ")[0])
        if " " in text
    ]
    assert len(quoted) > 50
    wanted = {text: re.compile(".*".join(map(re.escape, text.split("…")))) for text in quoted}
    assert [text for text, form in wanted.items() if not any(map(form.search, texts))] == []
