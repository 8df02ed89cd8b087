"""Plots of the simulation as SVG, with the simulation's assumptions."""

from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from bench.scale.simulation import BUCKET_S, Assumptions, Series

_METADATA = {"Date": None}  # the same figures make the same file


def draw(
    folder: Path, given: Assumptions, runs: dict[str, Series], times: dict[int, float]
) -> None:
    """Write waits.svg, replicas.svg and decisions.svg."""
    matplotlib.rcParams["svg.hashsalt"] = "scale"
    folder.mkdir(parents=True, exist_ok=True)
    _waits(folder, given, runs)
    _replicas(folder, given, runs["weights"])
    _decisions(folder, given, times)


def _sheet(given: Assumptions, rows: int):
    figure, axes = plt.subplots(rows, 1, figsize=(10, 2.6 * rows + 1), sharex=rows > 1)
    figure.subplots_adjust(left=0.08, right=0.68, top=0.9, bottom=0.18 / rows)
    figure.text(0.71, 0.9, _words(given), va="top", fontsize=8, family="monospace")
    return figure, axes


def _words(given: Assumptions) -> str:
    low, high = given.model_memory
    begin, end, factor = given.surge
    at, share = given.deaths
    return "\n".join(
        (
            "Assumptions",
            f"{given.hosts} hosts, {given.host_memory:g} GiB each,",
            f"  {given.fast_share:.0%} of them twice as fast",
            f"{given.models} models, {low:g}-{high:g} GiB",
            f"  popularity: Zipf, {given.popularity:g}",
            f"work for {given.use:.0%} of all hosts,",
            "  one executor each",
            f"a run: {given.run_s * 1000:g} ms, exponential",
            f"loading: {given.load_gib_per_s:g} GiB/s,",
            f"  at least {given.load_least_s:g} s, one at a time",
            f"queue target: {given.queue_s * 1000:g} ms",
            f"decisions: every {given.tick_s:g} s",
            f"ramp: full rate after {given.ramp_s:g} s",
            f"surge: {begin:g}-{end:g} s, one model",
            f"  in ten has {factor:g} times as much",
            f"deaths: {share:.0%} of hosts at {at:g} s,",
            f"  seen by the balancer after {given.check_s:g} s,",
            f"  by the cluster after {given.notice_s:g} s",
            f"seed: {given.seed}",
        )
    )


def _waits(folder: Path, given: Assumptions, runs: dict[str, Series]) -> None:
    figure, axis = _sheet(given, 1)
    for how, series in runs.items():
        for part, style in ((95, ":"), (99, "-")):
            points = [
                (bucket * BUCKET_S, max(0.01, sorted(waits)[len(waits) * part // 100]))
                for bucket, waits in sorted(series.waits.items())
                if waits
            ]
            label = f"p{part}, {'weights by speed' if how == 'weights' else 'equal weights'}"
            axis.plot(*zip(*points, strict=True), style, label=label)
    axis.set(xlabel="s", ylabel="s in queues", yscale="log", title="How long requests wait")
    axis.axhline(given.queue_s, color="grey", linewidth=0.5)
    axis.legend(fontsize=7)
    figure.savefig(folder / "waits.svg", metadata=_METADATA)
    plt.close(figure)


def _replicas(folder: Path, given: Assumptions, series: Series) -> None:
    figure, (upper, middle, lower) = _sheet(given, 3)
    now, wanted, ready = zip(*series.replicas, strict=True)
    upper.plot(now, wanted, label="wanted")
    upper.plot(now, ready, label="ready")
    upper.set(ylabel="replicas", title="Replicas of all models")
    upper.legend(fontsize=7)
    middle.plot(*zip(*series.unserved, strict=True))
    middle.set(ylabel="models without any")
    buckets: dict[int, int] = {}
    for at, number in series.loads:
        buckets[int(at / BUCKET_S)] = buckets.get(int(at / BUCKET_S), 0) + number
    lower.bar([b * BUCKET_S for b in buckets], list(buckets.values()), BUCKET_S, align="edge")
    lower.set(ylabel=f"loads in {BUCKET_S:g} s", xlabel="s", yscale="symlog")
    figure.savefig(folder / "replicas.svg", metadata=_METADATA)
    plt.close(figure)


def _decisions(folder: Path, given: Assumptions, times: dict[int, float]) -> None:
    figure, axis = _sheet(given, 1)
    axis.loglog(list(times), [seconds * 1000 for seconds in times.values()], "o-")
    axis.set(xlabel="hosts (a fifth as many models)", ylabel="ms", title="One decision, one core")
    axis.grid(alpha=0.3)
    figure.savefig(folder / "decisions.svg", metadata=_METADATA)
    plt.close(figure)
