"""The gunicorn worker class and its connections: from sockets to WSGI and back.

Sizes are exact integers, and are checked before memory is reserved. A warm small request takes six
system calls in a worker (`epoll_wait`, `recv`, `send` to the executor, `epoll_wait`, `recvmsg`,
`sendmsg`) and three in the executor (`epoll_wait`, `recvmsg`, `send`). A peek at the head (`head`)
costs a seventh call in the worker. An idle connection costs some 8 KiB and no thread.
"""
