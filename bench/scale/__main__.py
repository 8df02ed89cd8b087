"""``python -m bench.scale``: simulate and say what came out; the same each time.

python -m bench.scale                          # a thousand hosts, some minutes
python -m bench.scale --hosts 30 --seconds 120 # a short look
python -m bench.scale --plots docs/scale       # draw as well (extra: bench)
python -m bench.scale --measure                # what a host costs, with a service that runs here
"""

import argparse
import json
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.scale.simulation import BUCKET_S, Assumptions, Series, Simulation

SIZES = (10, 30, 100, 300, 1000)  # numbers of hosts for which the time of one decision is measured


def figures(series: Series, given: Assumptions) -> dict[str, Any]:
    """Return the figures of one run for the document."""
    total = {what: 0 for what in ("sent", "answered", "refused", "retried", "broken off")}
    for (what, _), number in series.counts.items():
        total[what] += number
    settled = int(given.ramp_s / BUCKET_S)
    surge_begin, surge_end, _ = given.surge
    quiet = _waits(series, settled, int(surge_begin / BUCKET_S))
    surge = _waits(series, int(surge_begin / BUCKET_S), int(surge_end / BUCKET_S))
    return {
        **total,
        "wait_s": {"before the surge": _percentiles(quiet), "during it": _percentiles(surge)},
        "decision_ms": {
            "median": round(median(series.step_s) * 1000, 1),
            "longest": round(max(series.step_s) * 1000, 1),
        },
        "loads": len(series.loads),
        "replicas_at_the_end": series.replicas[-1][2],
        "unserved_models_at_the_end": series.unserved[-1][1],
        "served_again_s": _served_again(series, given),
        "over_memory": series.over_memory,
        "flaps": series.flaps,
    }


def _waits(series: Series, first: int, end: int) -> list[float]:
    return sorted(wait for bucket in range(first, end) for wait in series.waits[bucket])


def _percentiles(waits: list[float]) -> dict[str, float]:
    if not waits:
        return {}
    return {
        f"p{part}": round(waits[min(len(waits) - 1, len(waits) * part // 100)], 3)
        for part in (50, 95, 99)
    }


def _served_again(series: Series, given: Assumptions) -> float | None:
    """Return the seconds from the hosts' death until every model has a replica again, or None if
    some model still had no replica at the end of the run."""
    at = given.deaths[0]
    after = [(now, lacking) for now, lacking in series.unserved if now >= at]
    lacking = [now for now, number in after if number]
    if not after or (lacking and lacking[-1] == after[-1][0]):
        return None
    return round(lacking[-1] + given.tick_s - at, 1) if lacking else 0.0


def decision_times(given: Assumptions) -> dict[int, float]:
    """Return the median seconds of one decision by number of hosts; models and requests grow in
    proportion."""
    found = {}
    for hosts in (size for size in SIZES if size <= given.hosts):
        models = max(2, given.models * hosts // given.hosts)
        small = replace(given, hosts=hosts, models=models, seconds=60.0, use=0.02)
        found[hosts] = median(Simulation(small).run().step_s)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--hosts", type=int, default=Assumptions.hosts)
    parser.add_argument("--models", type=int, default=0, help="default: a fifth of the hosts")
    parser.add_argument("--seconds", type=float, default=Assumptions.seconds)
    parser.add_argument("--seed", type=int, default=Assumptions.seed)
    parser.add_argument("--plots", metavar="DIR", help="draw SVGs into this folder")
    parser.add_argument("--measure", action="store_true", help="measure a host, simulate nothing")
    arguments = parser.parse_args()
    if arguments.measure:
        from bench.scale import one_host

        print(json.dumps(one_host.measure(), indent=1))
        return
    scale = arguments.seconds / Assumptions.seconds
    given = Assumptions(
        hosts=arguments.hosts,
        models=arguments.models or max(2, arguments.hosts // 5),
        seconds=arguments.seconds,
        seed=arguments.seed,
        ramp_s=Assumptions.ramp_s * scale,
        surge=(400.0 * scale, 600.0 * scale, 2.0),
        deaths=(751.0 * scale, 0.04),
    )
    runs = {how: Simulation(replace(given, balance=how)).run() for how in ("weights", "even")}
    times = decision_times(given)
    report = {how: figures(series, given) for how, series in runs.items()}
    print(json.dumps({"assumptions": asdict(given), **report, "decision_s": times}, indent=1))
    if arguments.plots:
        from bench.scale import plots

        plots.draw(Path(arguments.plots), given, runs, times)


if __name__ == "__main__":
    main()
