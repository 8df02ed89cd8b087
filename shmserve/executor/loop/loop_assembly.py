"""Loop assembly: builds a model's loop from the parts that the configuration needs."""

from __future__ import annotations

from functools import partial

from msgspec import Struct

from shmserve.core.scheduling.batch_policy import batch_policy
from shmserve.core.scheduling.request_queue import RequestQueue
from shmserve.core.scheduling.sequence_policy import MAX_SEQUENCES, sequence_policy
from shmserve.executor.backend import Backend
from shmserve.executor.loop.batch_runner import BatchRunner
from shmserve.executor.loop.loop import Loop, LoopParts, MakeRunner, ModelRuns
from shmserve.executor.loop.request_runner import RequestRunner
from shmserve.executor.loop.run_statistics import RunStatistics
from shmserve.executor.loop.runner import IsCancelled, Key, Requested, Runner
from shmserve.executor.loop.scheduler_intake import BatchIntake, SchedulerIntake
from shmserve.executor.loop.sequence_intake import SequenceIntake, SequenceRunner
from shmserve.executor.loop.stream_book import StreamBook
from shmserve.executor.loop.stream_runner import StreamRunner
from shmserve.executor.peers.channels import Channels
from shmserve.executor.rate_limited import SharedResources
from shmserve.executor.tensors.workspace import Workspace
from shmserve.executor.wrappers.sequence_backend import SequenceBackend


class LoopLimits(Struct, frozen=True):
    """Settings of the server that limit a loop. `segment_idle_s`: time, in seconds, until unused
    memory is given back. `max_streams`: number of open streams of one instance.
    `max_waiting_sequences`: number of sequences of one instance that wait for a slot.
    `caller_share`: largest part of the sequences for one caller."""

    segment_idle_s: float
    max_streams: int
    max_waiting_sequences: int = MAX_SEQUENCES
    caller_share: float = 1.0


def make_loop(
    backend: Backend,
    channels: Channels,
    workspace: Workspace,
    limits: LoopLimits,
    resources: SharedResources | None = None,
) -> Loop:
    """Return the loop that serves a loaded backend. `resources`: resources that the instance must
    hold for each run."""
    statistics = RunStatistics(channels.status.counters, workspace.spec)
    counts_runs = isinstance(backend, SequenceBackend)
    streams = StreamBook(channels, workspace, statistics, limits.max_streams, counts_runs)
    parts = LoopParts(channels, workspace, statistics, streams, limits.segment_idle_s)
    policy = batch_policy(workspace.spec.config)
    if isinstance(backend, SequenceBackend):
        intake, make_runner = _sequences(backend, parts, limits)
    elif workspace.spec.decoupled:
        requests: RequestQueue[Key, Requested] = RequestQueue()
        intake = SchedulerIntake(requests, requests.push, is_watched=True)
        make_runner = _run_streams(backend, parts)
    elif policy is not None:
        batching = BatchIntake(channels, workspace, statistics, policy, backend.batching)
        intake = SchedulerIntake(batching.queue, batching.push, policy.is_bounded)
        make_runner = _run_batches(backend, parts)
    else:
        queue: RequestQueue[Key, Requested] = RequestQueue()
        intake = SchedulerIntake(queue, queue.push, is_watched=False)
        make_runner = _run_requests(backend, parts, queue)
    return Loop(parts, intake, make_runner, resources)


def _sequences(
    backend: SequenceBackend, parts: LoopParts, limits: LoopLimits
) -> tuple[SchedulerIntake, MakeRunner]:
    """Return intake and runner factory of a model with sequences.

    Frontends read from the status page which sequences live here, before they send a request. The
    page must not wait for the model, so a second thread watches the channels.
    """
    spec = parts.workspace.spec
    policy = sequence_policy(spec.config, limits.max_waiting_sequences, limits.caller_share)
    assert policy is not None  # a `SequenceBackend` has `sequence_batching`
    intake = SequenceIntake(backend, parts.channels, parts.workspace, parts.statistics, policy)
    make_inner = _run_streams(backend, parts) if spec.decoupled else _run_batches(backend, parts)

    def make_runner(is_cancelled: IsCancelled, model_runs: ModelRuns) -> Runner:
        inner = make_inner(is_cancelled, model_runs)
        return SequenceRunner(inner, intake, backend.states, is_cancelled)

    in_order = spec.decoupled  # clients of streams do not wait for answers
    return (
        SchedulerIntake(intake.queue, intake.push, True, in_order, intake.rejection),
        make_runner,
    )


def _run_requests(
    backend: Backend, parts: LoopParts, queue: RequestQueue[Key, Requested]
) -> MakeRunner:
    return lambda is_cancelled, _: RequestRunner(
        backend, parts.workspace, parts.statistics, is_cancelled, queue.peek
    )


def _run_batches(backend: Backend, parts: LoopParts) -> MakeRunner:
    return partial(BatchRunner, backend, parts.workspace, parts.statistics)


def _run_streams(backend: Backend, parts: LoopParts) -> MakeRunner:
    return lambda _, model_runs: StreamRunner(backend, parts.streams, model_runs)
