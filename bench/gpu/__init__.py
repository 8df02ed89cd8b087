"""What a GPU adds, in one run: ``python -m bench.gpu --help``.

    copies   host to device and back: `Device.bring` and `take_out` on a segment as an executor
             maps it, beside bare copies of memory that CUDA itself has allocated
    regions  adding 1 on the GPU: in place in a CUDA region, from and to a system region, and with
             the tensor in ModelInfer messages and in binary HTTP bodies
    overlap  two callers of an instance that computes for about as long as its input's copy takes,
             beside one caller
    rounds   register, infer, unregister, over HTTP and gRPC: device memory before and after
    deaths   a client that is killed -9 while its memory is registered: when it is back, and
             whether others notice

The bench is the client: its memory is opened by the server's executors, other processes.
Contestants take turns, every second round backwards; medians; only ratios within one run mean
anything. Answers and receipts are checked: exit status 1 if one is wrong or memory is lost.
On the fake CUDA of the tests everything runs, but nothing is timed.
"""
