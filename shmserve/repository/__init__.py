"""The model repository: folders on disk to what can be served, or why not.

`scan` looks at every model, `find` at one. Both read only configuration, labels and
the presence of model files; models are loaded by executors.
"""

from shmserve.repository.folder import ModelFolder, read_folder, read_labels
from shmserve.repository.scan import ScanResult, find, scan

__all__ = ["ModelFolder", "ScanResult", "find", "read_folder", "read_labels", "scan"]
