"""GRPS messages, their names, and the parameters of models for GRPS: bytes to values and back.
Pure.

Tensors are read and written in bulk, as protobuf and as JSON: no Python loop runs over their
elements (`json_writer` finds the shortest decimals of FP32 numbers).
"""
