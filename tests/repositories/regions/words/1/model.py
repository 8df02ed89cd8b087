"""Gives its words back."""


class Model:
    def infer(self, request):
        return {"OUT": request.input("IN")}
