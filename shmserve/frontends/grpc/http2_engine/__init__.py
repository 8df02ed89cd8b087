"""The engine: HTTP/2 (`frontends.http2`) on one epoll loop, with rpcs as greenlets of the loop.

The loop's thread owns sockets, connections, calls and places. Other threads post functions to the
loop. A function that the loop calls back must not wait.

A unary call takes its place as soon as its head has arrived, which also bounds the number of
incomplete messages. While four messages of a stream wait, the stream's client may send no more. A
streaming rpc continues once the socket has taken its answer.

`sendmsg` sends the head of an answer together with views of the output slots. The inference is
closed when the socket has taken the last byte, or when the answer cannot be sent any more. Already
framed parts of a reset stream are still sent, so their memory stays in use until then.

The engine offers clients frames of 1 MiB, which gRPC's C++ core uses. To clients that accept
larger frames, the engine sends frames slightly larger than 1 MiB, so that a tensor of 1 MiB and
the message around the tensor fit one frame.
"""
