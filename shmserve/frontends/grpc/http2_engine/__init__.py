"""The engine: HTTP/2 (`frontends.http2`) on one epoll loop, with rpcs as greenlets of that loop.

One thread, the loop's, owns sockets, connections, calls and their places. Other threads post to the
loop what they want of these. A function that the loop calls back must not wait.

A unary call has its place from its head on, so messages under way are bounded, too. A stream's
client may send no more while four of its messages wait. An rpc that streams goes on when the system
has taken its answer. The head of an answer and views of the output slots go out by `sendmsg`; the
inference is closed when the last byte has been taken, or never will be. A part of a reset stream
that is framed already is sent, so its memory is in use until then.

Clients are offered frames of 1 MiB, which gRPC's C++ core makes use of. They are sent frames a
little larger where they take them, so that a tensor of 1 MiB and the message around it are one
frame.
"""
