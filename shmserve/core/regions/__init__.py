"""Client memory by name: who may register, use, see and remove what."""
