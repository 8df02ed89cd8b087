"""Stats: counters of processes, and the rates, time series, model metrics and incidents made of
them."""
