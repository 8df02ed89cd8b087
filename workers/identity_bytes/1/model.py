"""Answers with its strings; BYTES outputs are returned, since their size is not known before."""


class Model:
    def infer(self, request):
        return {"OUTPUT0": request.input("INPUT0")}
