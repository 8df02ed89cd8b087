"""The gRPC process: server and listeners, calls of the inference service, health.

A call passes through these layers:

- `frontends.http2` implements the protocol, without sockets or time.
- `http2_engine` has sockets, connections and calls on one epoll loop, the same hub as in HTTP
  workers.
- `handlers` admits a call and turns errors into statuses.
- The rpcs use none of the above.

`protocol.protobuf` reads and writes the large messages. Checks, regions, statistics and the driver
`frontends.inference` are shared with HTTP.

Every rpc is a greenlet of the loop, from the last byte of its message until its answer is framed.
The greenlet switches to the loop where it must wait (`shmserve.waiting`), and long work runs
beside the loop. Long work includes reading a message with more than 2 KiB besides raw tensors,
because typed contents are read element by element. If one receive brings several calls, the first
runs at once, and the others run after the loop has handled other ready events.

A server registers its methods from the service's descriptor in `_generated/grpc_service_pb2.py`,
and each method brings its own (de)serialiser: there is no generated gRPC stub.
"""
