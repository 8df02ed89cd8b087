"""Answers with the message it gets."""


class Model:
    def infer(self, request):
        return request.grps
