"""What a model of sequences gets besides what clients send: control tensors and states.

`core.scheduling.sequence_queue` knows the sequences of the instance, which of them have a slot, and
what runs next. The modules here stand between the loop and the backend: they add control tensors
and states to the inputs that clients have sent, keep the states, and stack requests by rows where
the model wants one tensor. The second thread always looks after the channels of such a model, so
that nobody waits for the model to see a page.
"""
