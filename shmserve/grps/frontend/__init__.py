"""GRPS over HTTP and gRPC: payloads, names of models, metadata, the online flag.

The modules here know no transport; `http/` and `rpcs` carry what they say. The online flag is one
of the snapshot's `flags`, which the coordinator alone changes.
"""
