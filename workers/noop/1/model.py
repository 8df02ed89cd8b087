"""Does nothing, to measure what the server costs."""


class Model:
    def infer(self, request):
        request.output("OUTPUT0", (1,))[0] = 0.0
