"""The gRPC process: its server and listeners, the calls of the inference service, health.

The way of a call: `frontends.http2` knows the protocol and neither sockets nor time; `http2_engine`
has sockets, connections and calls on one epoll loop, the hub that HTTP workers have as well;
`handlers` admits a call and turns errors into statuses; the rpcs know nothing of all that. Reading
and writing of the large messages is in `protocol.protobuf`. Checks, regions, statistics and the
driver `frontends.inference` are as for HTTP.

Every rpc is a greenlet of the loop, from the last byte of its message until its answer is framed.
It gives way where it would wait (`shmserve.waiting`), and long work runs beside the loop. That
includes reading a message with more than 2 KiB beside raw tensors, because typed contents are read
element by element. Of the calls that one receive brings, the first runs at once, the others when
the loop has looked at what else is ready.

A server registers its methods from the service's descriptor in `_generated/grpc_service_pb2.py`,
and each method brings its own (de)serialiser: there is no generated gRPC stub.
"""
