"""Effect runner: writes down, publishes and sends the reconciler's decisions."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from msgspec import Struct

from shmserve.coordinator.models.repository_jobs import RepositoryJobs
from shmserve.coordinator.models.supervisor_sync import Send, SupervisorSync
from shmserve.coordinator.state.checkpoint import CheckpointFile
from shmserve.coordinator.state.publication import Publication
from shmserve.core import effects
from shmserve.core.control.reconciler import Reconciler
from shmserve.log_fields import log_fields
from shmserve.observe import flight_recorder
from shmserve.protocol.control.link_messages import Granted, Stop, Trim

_log = logging.getLogger(__name__)


class EffectRunner(Struct, frozen=True):
    """Performs effects. Decisions of one call are written to the checkpoint before any process
    hears of them."""

    _reconciler: Reconciler
    _checkpoint: CheckpointFile
    _publication: Publication
    _sync: SupervisorSync
    _jobs: RepositoryJobs
    _send: Send

    def perform(self, decided: Sequence[effects.Effect]) -> None:
        durable = effects.Publish | effects.Desire | effects.Forget
        if any(isinstance(effect, durable) for effect in decided):
            self._checkpoint.write(self._reconciler, self._sync.instances, self._jobs.tried)
        if any(isinstance(effect, effects.Publish) for effect in decided):
            self._publication.publish()
        for effect in decided:
            match effect:
                case effects.AnswerGrant():
                    if not effect.granted:
                        flight_recorder.record("limit reached", effect.process, effect.reason)
                    granted = Granted(effect.ticket, effect.granted, effect.reason)
                    self._send(effect.process, granted)
                case effects.AskTrim():
                    self._send(effect.process, Trim(effect.nbytes))
                case effects.Dismiss():
                    flight_recorder.record("process dismissed", effect.process, effect.reason)
                    self._send(effect.process, Stop(effect.reason))
                case effects.Desire():
                    self._sync.changed()
                case effects.Forget():
                    self._sync.forget(effect.instances)
                    if effect.overrides:
                        self._jobs.remove(effect.overrides)
                case effects.LogForOperators():
                    about = log_fields(**effect.fields)
                    flight_recorder.record("warning", "coordinator", effect.text, effect.fields)
                    _log.warning("%s", effect.text, extra=about)
        self._sync.tell()

    def look(self) -> None:
        """Once a second, retry the checkpoint and the publication if the run directory had no
        space."""
        if self._checkpoint.file.late:
            self._checkpoint.write(self._reconciler, self._sync.instances, self._jobs.tried)
        self._checkpoint.file.keep_room()
        self._publication.look()
