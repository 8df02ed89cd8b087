"""Which request runs when, how far a stream may run ahead, what follows what in a pipeline."""
