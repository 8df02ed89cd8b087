"""Messages of the control plane, one file a subject; `messages` has the unions per channel."""
