"""Peers of the executor: channels to frontends, and lanes to untrusted local programs."""
