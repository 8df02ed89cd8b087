"""The yardstick for small requests: receives the tensor, computes nothing, answers a constant.

What is left of a server when there is no model: HTTP, Falcon and the worker class.
"""

from bench.rivals.surface import create_app, read_tensor


def infer(environ, name):
    tensor = read_tensor(environ)
    return tensor[:4] if name == "noop" else tensor


application = create_app(infer)
