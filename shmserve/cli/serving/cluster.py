"""Command ``shmserve cluster up | status | down | haproxy``: a service on many hosts, through
Ray."""

import argparse
import sys

import msgspec

from shmserve.cli.operating.show import Row
from shmserve.cluster import cluster_file, commands, haproxy_config
from shmserve.cluster.controller import Status

_UNIT = 1 << 20


def main(arguments: argparse.Namespace) -> int:
    """Run the subcommand, print the outcome, and return the exit status."""
    file = cluster_file.read(arguments.file)
    if arguments.what == "haproxy":
        sys.stdout.write(haproxy_config.text(file))
        return 0
    if arguments.what == "down":
        commands.down(file)
        print("the cluster is down")
        return 0
    status = commands.up(file) if arguments.what == "up" else commands.status(file)
    if getattr(arguments, "json", False):
        sys.stdout.buffer.write(msgspec.json.encode(document(status)) + b"\n")
    else:
        _print(status)
    return 0 if all(row["ready"] for row in document(status)["models"]) else 1


def document(status: Status) -> dict[str, list[Row]]:
    """Return the rows of nodes, models and problems, as the tables show them."""
    ready = commands.ready(status)
    decision = status.decision
    nodes = [
        {
            "node": name,
            "address": f"{report.http.host}:{report.http.port}" if report.http else "",
            "room_bytes": report.look.room,
            "ready": sorted(report.look.ready),
            "coming": sorted(decision.orders.get(name, frozenset()) - report.look.ready),
            "launches": report.launches,
            "problem": report.problem,
        }
        for name, report in sorted(status.nodes.items())
    ]
    models = [
        {
            "model": name,
            "replicas": replicas,
            "ready": ready.get(name, 0),
            "without_room": decision.missing.get(name, 0),
            "weights": dict(sorted(decision.routes.get(name, {}).items())),
        }
        for name, replicas in sorted(decision.replicas.items())
    ]
    problems = [{"problem": problem} for problem in status.problems]
    return {"nodes": nodes, "models": models, "problems": problems}


def _print(status: Status) -> None:
    rows = document(status)
    print(f"{'node':<14}{'address':<23}{'room':>9}  models")
    for node in rows["nodes"]:
        models = [*node["ready"], *(f"({name})" for name in node["coming"])]
        room = f"{node['room_bytes'] // _UNIT} MiB"
        address = node["address"] or "(not up)"
        print(f"{node['node'][:12]:<14}{address:<23}{room:>9}  {' '.join(models)}")
        if node["problem"]:
            print(f"{'':<14}{node['problem']}")
    print(f"\n{'model':<30}{'wanted':>8}{'ready':>8}{'no room':>9}")
    for model in rows["models"]:
        numbers = f"{model['replicas']:>8}{model['ready']:>8}{model['without_room']:>9}"
        print(f"{model['model']:<30}{numbers}")
    for problem in rows["problems"]:
        print(problem["problem"])
