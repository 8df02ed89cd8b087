"""The common design: the tensor goes to the model's process through multiprocessing queues.

One model process for each HTTP worker; a thread hands the answers to those who wait for them.
"""

import numpy as np

from bench.rivals.model_process import Model
from bench.rivals.surface import create_app, read_tensor

# gunicorn imports this in each HTTP worker, after the fork and before any thread.
model = Model()
application = create_app(
    lambda environ, name: model.ask(name, np.frombuffer(read_tensor(environ), dtype="<f4"))
)
