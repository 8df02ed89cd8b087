"""Streams the input word by word; without a stream, answers all words at once."""

from shmserve import grps


class Model:
    def infer(self, request):
        text = request.http.data.decode() if request.http else request.grps.str_data
        for word in text.split() if request.streaming else [text]:
            if word == "raise":
                raise ValueError("lost for words")
            yield f"{word};" if request.http else grps.Message(str_data=word)
