"""Messages of GRPS, their names and what models say about them: bytes to values and back (pure).

Tensors are read and written in bulk, as protobuf and as JSON: no Python loop sees their elements
(`protocol.shortest_floats` finds the shortest decimals of FP32 numbers).
"""
