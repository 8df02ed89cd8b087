"""Does nothing: measures the server's own cost."""


class Model:
    def infer(self, request):
        request.output("OUTPUT0", (1,))[0] = 0.0
