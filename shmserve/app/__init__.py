"""The WSGI entry: ``gunicorn shmserve.app``.

gunicorn imports it in each HTTP worker, after the fork (`preload_app` stays off), so
nothing that must not be forked exists before.
"""

from __future__ import annotations

import gc

from shmserve import config
from shmserve.dispatch.process.dispatcher import Dispatcher
from shmserve.frontends.http.routes.application import worker_application

_settings = config.load()
_dispatcher = Dispatcher(_settings)
_dispatcher.start()

application = worker_application(_dispatcher, _settings)

gc.collect()
gc.freeze()  # modules and routes live for ever: no request should pay for looking at them


def close() -> None:
    """Let go of shared memory and executors; gunicorn's worker_exit hook calls it."""
    _dispatcher.close()
