"""Sequences: control tensors and states, which a model gets beside the inputs of clients.

`core.scheduling.sequence_queue` knows the sequences of the instance, which of them have a slot, and
which request runs next. The modules here stand between the loop and the backend. They add control
tensors and states to the inputs of clients, keep the states, and stack requests by rows where the
model wants one tensor. The second thread always looks after the channels of such a model, so that
frontends see a new status page without waiting for the model.
"""
