"""The process that starts, adopts and stops the others, and keeps descriptors for them."""
