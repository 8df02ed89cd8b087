"""Code that `proto/generate.py` writes from `proto/`; not edited by hand, checked by CI.

Importing it registers messages of the package `inference`; tritonclient's gRPC stubs
register the same names, so the two never live in one process. Messages of gRPC's health and
reflection services are in descriptor pools of their own, so grpc_health and grpc_reflection may
live beside them.
"""
