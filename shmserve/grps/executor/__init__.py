"""GRPS projects: their own code (`ModelInferer`, `Converter`, `GrpsContext`) runs unmodified.

What they import as `grps_framework` are the modules of this package (`framework.py` has
the list); `project_backend.py` runs them, `project_models.py` is what inference.yml describes.
"""
