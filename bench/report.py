"""Tables and plots of a result file: ``python -m bench.report RESULT.json [PLOT.svg]``."""

import json
import sys
from pathlib import Path

from bench import cpu_time

BASE = "shmserve"


def size_name(nbytes):
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


def micros(value):
    return f"{value / 1000:.1f} ms" if value >= 10_000 else f"{value:.0f} us"


def _rate(value):
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def table(result):
    """The result as Markdown."""
    machine = result["machine"]
    lines = [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, Linux "
        f"{machine['kernel']}, Python {machine['python']}; commit {result['commit']}, "
        f"{result['date']} UTC; {result['options']['rounds']} rounds, medians (lowest-highest "
        "round).",
        "",
        "| floor | time |",
        "|---|---|",
    ]
    for name, floor in result["floors_us"].items():
        spread = f"{micros(floor['min'])}-{micros(floor['max'])}"
        lines.append(f"| {name} | {micros(floor['median'])} ({spread}) |")
    lines += [
        "",
        "| request | server | p50 | p99 | requests/s | times shmserve's p50 | CPU us a request |",
    ]
    lines.append("|---|---|---|---|---|---|---|")
    base = {_key(c): c["p50_us"]["median"] for c in _measured(result) if c["server"] == BASE}
    for case in result["cases"]:
        lines.append(_row(case, base.get(_key(case))))
    return "\n".join(lines)


def _key(case):
    return case["model"], case["bytes"], case["connections"]


def _measured(result):
    return [case for case in result["cases"] if "p50_us" in case]


def _row(case, base):
    what = f"{case['model']} {size_name(case['bytes'])}, {case['connections']} conn."
    if "p50_us" not in case:
        why = case["refused"] or "every round failed"
        return f"| {what} | {case['server']} | refused: {why[:80]} | | | | |"
    p50, p99, rate = case["p50_us"], case["p99_us"], case["per_s"]
    ratio = f"{p50['median'] / base:.2f}" if base else ""
    if case["failed_rounds"]:
        ratio += f" ({case['failed_rounds']} rounds with errors left out)"
    times = f"{micros(p50['median'])} ({micros(p50['min'])}-{micros(p50['max'])})"
    rates = f"{_rate(rate['median'])} ({_rate(rate['min'])}-{_rate(rate['max'])})"
    cells = what, case["server"], times, micros(p99["median"]), rates, ratio
    return f"| {' | '.join(cells)} | {cpu_time.shown(case.get('cpu_us', {}))} |"


def plot(result, path):
    """Latency and throughput of the identity model over tensor size."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = [case for case in _measured(result) if case["model"] == "identity"]
    connections = sorted({case["connections"] for case in cases})
    figure, axes = pyplot.subplots(
        2, len(connections), figsize=(5 * len(connections), 8), squeeze=False
    )
    for column, number in enumerate(connections):
        for server in dict.fromkeys(case["server"] for case in cases):
            mine = [c for c in cases if c["server"] == server and c["connections"] == number]
            sizes = [case["bytes"] for case in mine]
            times = [case["p50_us"]["median"] / 1000 for case in mine]
            rates = [case["bytes"] * case["per_s"]["median"] / 2**20 for case in mine]
            axes[0][column].plot(sizes, times, marker="o", label=server)
            axes[1][column].plot(sizes, rates, marker="o", label=server)
        for row, what in enumerate(("median latency, ms", "MiB/s in (and out)")):
            axis = axes[row][column]
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            ticks = sorted({case["bytes"] for case in cases})
            axis.set_xticks(ticks, [size_name(size) for size in ticks], rotation=45)
            axis.set_ylabel(what)
            axis.set_title(f"identity, {number} connection{'s' * (number > 1)}")
            axis.grid(visible=True, alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    document = json.loads(Path(sys.argv[1]).read_text())
    print(table(document))
    if len(sys.argv) > 2:
        plot(document, sys.argv[2])
