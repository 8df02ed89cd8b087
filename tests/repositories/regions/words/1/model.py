"""Returns the input words."""


class Model:
    def infer(self, request):
        return {"OUT": request.input("IN")}
