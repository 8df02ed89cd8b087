"""gunicorn's own answer: a "dirty worker" holds the model, bytes go there over a socket.

Needs ``dirty_apps = ["bench.rivals.dirty_app:Model"]`` and ``dirty_workers = 1``. gunicorn
caps values and messages at 64 MiB; larger tensors are refused, which the report says.
"""

from gunicorn.dirty import get_dirty_client
from gunicorn.dirty.app import DirtyApp

from bench.rivals.surface import create_app, read_tensor


class Model(DirtyApp):
    def __call__(self, action, *args, **kwargs):
        (tensor,) = args
        return tensor[:4] if action == "noop" else tensor


def infer(environ, name):
    tensor = bytes(read_tensor(environ))
    return get_dirty_client(timeout=120).execute("bench.rivals.dirty_app:Model", name, tensor)


application = create_app(infer)
