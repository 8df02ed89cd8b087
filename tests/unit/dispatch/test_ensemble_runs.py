"""Runs side by side, with as many threads as there are."""

import threading
import time

from shmserve.core.scheduling.ensemble_progress import GraphProgress, Run
from shmserve.dispatch.ensembles import ensemble_runs
from shmserve.dispatch.ensembles.ensemble_runs import StepRuns, StepThreads
from shmserve.tensor.spec import EnsembleStep

STEPS = (
    EnsembleStep("first", "", {"IN": "IN"}, {"OUT": "x"}),
    EnsembleStep("one", "", {"IN": "x"}, {"OUT": "a"}),
    EnsembleStep("two", "", {"IN": "x"}, {"OUT": "b"}),
)


def test_who_waits_takes_what_no_other_thread_can(monkeypatch) -> None:
    monkeypatch.setattr(ensemble_runs, "_TICK_S", 60.0)
    both = threading.Barrier(2)

    def perform(run: Run) -> bool:
        if run.step:
            both.wait(20)  # the steps run side by side, or the barrier ends in an error
        with runs.lock:
            progress.began(run)
            progress.gave(run)
        return False

    progress = GraphProgress(STEPS, ["IN"], ["a", "b"], 1)
    runs = StepRuns(progress, StepThreads(1), perform, lambda: None)
    assert runs.next_answer(False, time.monotonic() + 60, "overdue") is not None
    runs.stop()
