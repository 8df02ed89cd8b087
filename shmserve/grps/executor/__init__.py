"""GRPS projects: their own code (`ModelInferer`, `Converter`, `GrpsContext`) runs unmodified.

What they import as `grps_framework` are the modules of this package (`framework.py` has
the list); `project_backend.py` runs them, `project_models.py` is what inference.yml describes.

A project is a decoupled model whose one input and output are serialized messages
(`grps.protocol.model_parameters`), or the head and body of a custom HTTP request. Requests run in
`max_concurrency` threads. The executor's main thread takes no further request from the queue until
a thread is free. A model with `batching` is a step at which these threads meet (`batcher`). The
package `grps_framework` exists in these executors only.
"""
