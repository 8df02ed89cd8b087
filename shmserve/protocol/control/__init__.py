"""Messages of the control plane, a file per subject. `messages` has the unions per channel."""
