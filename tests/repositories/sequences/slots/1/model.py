"""Returns for each sequence the row, the number of ready rows, and the number of calls."""

import os
import time

import numpy as np


class Model:
    def infer_batch(self, batch):
        commands, ids = batch.input("COMMAND")[:, 0], batch.input("ID")[:, 0]
        ready, steps = batch.input("READY")[:, 0], batch.input("STEPS")
        for command in commands:
            if command.startswith(b"hold:"):
                path = command[5:].decode()
                open(f"{path}.begun", "w").close()
                while os.path.exists(path):
                    time.sleep(0.01)
        batch.output("STEPS_NEXT", steps.shape)[:] = steps + 1
        texts = [
            f"{name.decode()} in {row}, {ready.sum()} ready, step {step}"
            for row, (name, (step,)) in enumerate(zip(ids, steps, strict=True))
        ]
        return {"TEXT": np.array(texts, object).reshape(-1, 1)}

    infer = infer_batch
