class Model:
    """Fails with an array of its input at hand."""

    device_tensors = True

    def infer(self, request):
        source = request.input("IN")
        raise ValueError(f"{len(source)} elements are not what I like")
