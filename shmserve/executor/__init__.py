"""The process that runs one instance of a model: requests in, the backend's outputs back."""
