"""The WSGI entry: ``gunicorn shmserve.app``.

gunicorn imports this module in each HTTP worker, after the fork (`preload_app` stays off). So no
object that must not be forked exists before.
"""

import gc

from shmserve import config
from shmserve.dispatch.process.dispatcher import Dispatcher
from shmserve.frontends.http.routes.application import worker_application

_settings = config.load()
_dispatcher = Dispatcher(_settings)
_dispatcher.start()

application = worker_application(_dispatcher, _settings)

gc.collect()
gc.freeze()  # modules and routes live as long as the process: no collection should scan them


def close() -> None:
    """Release shared memory and executors. gunicorn's worker_exit hook calls this function."""
    _dispatcher.close()
