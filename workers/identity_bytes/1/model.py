"""Returns its strings. BYTES outputs are returned by `infer`, because their size is not known
before."""


class Model:
    def infer(self, request):
        return {"OUTPUT0": request.input("INPUT0")}
