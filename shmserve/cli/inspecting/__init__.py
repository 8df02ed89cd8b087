"""Commands that look before anything is served: the host, settings, model folders."""
