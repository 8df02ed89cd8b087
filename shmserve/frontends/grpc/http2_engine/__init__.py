"""The engine of our own: HTTP/2 (`frontends.http2`) on one epoll loop, rpcs in their pools.

One thread, the loop's, owns sockets, connections and the calls' places in them. An rpc's thread has
its call alone (`Http2Call`); what it wants sent or ended it posts to the loop.
"""
