"""gunicorn's settings and hooks for shmserve. The hooks only call other modules.

The master process must stay empty: no shared memory, no gRPC, no CUDA, no threads. The master
forks HTTP workers from this state at any time.

`kill -HUP` runs this file again and replaces the HTTP workers. The settings stay as read at the
start (`launch.settings`). `kill -USR2` hands over to a new generation of all processes
(`supervisor.generations.handover`). `shmserve serve` stays the parent of every generation's master
(`supervisor.generations.keeper`).
"""

import os
import sys

from setproctitle import setproctitle

from shmserve import build_id, library_telemetry
from shmserve.config import run_dir  # (gunicorn has a setting named `config`)
from shmserve.errors import ConfigError
from shmserve.frontends.http.server import sign_of_life
from shmserve.frontends.oip.restricted_apis import check_settings
from shmserve.observe import logs, trace_files
from shmserve.supervisor import guard, launch
from shmserve.transport import extras, processes
from shmserve.transport.trust import key_file, tls

processes.undo_parents_state()
library_telemetry.switch_off(os.environ)  # all processes inherit the variables
build_id.pass_on_tree(os.environ)

try:
    _settings = launch.settings()
except ConfigError as ex:
    launch.failed(ex.message)

wsgi_app = "shmserve.app"
proc_name = "shmserve"
bind = [*_settings.http_bind, *_settings.metrics_bind]
workers = _settings.http_workers
worker_class = "shmserve.frontends.http.server.worker.ConnectionWorker"
worker_connections = _settings.max_connections
worker_tmp_dir = "/dev/shm"  # of the heartbeat file, unlinked at once: a disk would delay beats
preload_app = False  # the application attaches to the service after the fork
control_socket_disable = True  # on by default, at a path that all servers of a user share
loglevel = _settings.log_level
logs.setup("master", _settings.log_level, _settings.log_format, forks=True)
logger_class = "shmserve.frontends.http.server.service_log.ServiceLog"
accesslog = "-" if _settings.access_log else None
access_log_format = '%(h)s "%(r)s" %(s)s %(b)s %(M)sms %({x-request-id}o)s'
timeout = max(1, round(_settings.watchdog_s))  # limit for the main thread's sign of life
graceful_timeout = max(1, round(_settings.drain_timeout_s))
keepalive = max(1, round(_settings.idle_timeout_s))
limit_request_line = 8190  # gunicorn's largest; max_head_bytes limits the whole head
limit_request_field_size = min(_settings.max_head_bytes, 65536)


def on_starting(server):
    try:
        check_settings(_settings)
        key_file.read(_settings)
        extras.require(_settings)
        encrypted = tls.certificates(_settings, "http", "http/1.1")
        tls.certificates(_settings, "grpc", "h2")
        if encrypted and server.cfg.worker_class_str != worker_class:  # others speak without TLS
            raise ConfigError("http_tls_cert is for the server's own worker class, not for another")
        launch.prepare(_settings)
        launch.claim(_settings, server.cfg.address)
        if not launch.follows():  # in a reload the predecessor still has the trace files
            trace_files.begin(_settings)  # the trace files are this service's from here on
        sign_of_life.when_asked(launch.beat)
    except ConfigError as ex:
        launch.failed(ex.message)


def when_ready(server):
    # leaves the files of Unix sockets, which another generation may have by then
    server.systemd = True
    stop = server.stop

    def tell_and_stop(graceful=True):
        launch.stopping(_settings, [s.getsockname() for s in server.LISTENERS])
        stop(graceful)

    server.stop = tell_and_stop
    launch.begin(_settings, map(str, server.LISTENERS))


def on_reload(server):
    if launch.changed_on_disk():
        server.log.warning("settings have changed: restart the service to apply them")


def pre_exec(server):  # SIGUSR2: in a fork of the master
    launch.hand_over([s.fileno() for s in server.LISTENERS], server.cfg.env_orig)


def pre_fork(server, worker):
    # here, because gunicorn sets its own title after its start; a host may run several services
    setproctitle(f"shmserve: master ({run_dir(_settings)})")


def post_fork(server, worker):
    launch.forked()
    setproctitle(f"shmserve: http worker {worker.age}")
    logs.setup(f"http worker {worker.age}", _settings.log_level, _settings.log_format)


def post_worker_init(worker):
    guard.start_guard(_settings)

    def waits():
        worker.notify()
        return worker.alive

    launch.await_turn(_settings, waits)


def worker_exit(server, worker):
    application = sys.modules.get("shmserve.app")  # absent if the worker could not boot
    if application is not None:
        application.close()


def on_exit(server):
    launch.end(_settings)
