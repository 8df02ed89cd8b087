"""GRPS projects: a project's own code (`ModelInferer`, `Converter`, `GrpsContext`) runs
unmodified.

Projects import the modules of this package as `grps_framework` (list: `framework.py`).
`project_backend.py` runs projects. `project_models.py` has the models that inference.yml
describes.

A project is a decoupled model. Its only input and output are serialized messages
(`grps.protocol.model_parameters`), or the head and body of a custom HTTP request. Requests run in
`max_concurrency` threads. While all threads are busy, the executor's main thread takes no further
request from the queue. At a model with `batching`, the threads meet (`batcher`). The package
`grps_framework` exists in executors of projects only.
"""
