"""What the processes decide and count, as plain objects: no system call, no thread, no clock."""
