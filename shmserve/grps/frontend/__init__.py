"""GRPS over HTTP and gRPC: payloads, names of models, metadata, the online flag.

The modules of this folder know no transport; `http/` and `rpcs` carry the results. The online flag
is in the snapshot's `flags`, which the coordinator alone changes.
"""
