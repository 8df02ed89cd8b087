"""The model repository: folders on disk to what can be served, or why not.

`scan` looks at every model, `find` at one, `survey` only at whether they have changed. They
read configuration, labels and the presence of model files; models are loaded by executors.
"""

from shmserve.repository.fingerprint import fingerprint, survey
from shmserve.repository.model_folder import ModelFolder, read_folder, read_labels
from shmserve.repository.scan import ScanResult, find, locate, names, pending, scan

__all__ = [
    "ModelFolder",
    "ScanResult",
    "find",
    "fingerprint",
    "locate",
    "names",
    "pending",
    "read_folder",
    "read_labels",
    "scan",
    "survey",
]
