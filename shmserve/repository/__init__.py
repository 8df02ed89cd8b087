"""The model repository: folders on disk, turned into models to serve or reasons for failure.

`scan` looks at every model, `find` at one model, `survey` only for changes. All of them read
configuration, labels and the presence of model files. Executors load the models.
"""

from shmserve.repository.fingerprint import fingerprint, survey
from shmserve.repository.model_folder import ModelFolder, read_folder, read_labels
from shmserve.repository.scan import ScanResult, find, locate, names, pending, scan

__all__ = [
    "ModelFolder", "ScanResult", "find", "fingerprint", "locate", "names", "pending",
    "read_folder", "read_labels", "scan", "survey",
]  # fmt: skip
