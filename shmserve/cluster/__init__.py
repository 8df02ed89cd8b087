"""Many hosts of one service: what is served where, decided here, done through Ray and HAProxy.

Requests and tensors never come this way. Without the extra `ray` nothing of it is imported.
"""
