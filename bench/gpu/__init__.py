"""Gains from a GPU, in one run: ``python -m bench.gpu --help``.

    copies   host to device and back: `Device.bring` and `take_out` on a segment of 64 MiB as an
             executor maps it, beside bare copies (cudaMemcpyAsync) of memory of cudaHostAlloc
    regions  adding 1 on the GPU to 1, 16, 64 and 256 MiB: in place in a CUDA region, from and to a
             system region, and with the tensor in ModelInfer messages and in binary HTTP bodies
    overlap  two callers of an instance that computes for about as long as its input's copy takes,
             beside one caller
    deaths   a client that is killed -9 while its memory is registered: time until the memory is
             free, and effects on others
    executors  an executor that is killed -9 while it holds GPU memory: time until the memory is
             free, and until another executor answers
    rounds   register, infer, unregister, 10,000 times over HTTP and over gRPC, or as often as a
             time limit allows: the device's free memory before and after

The bench is the client: executors of the server, other processes, open its memory. Contestants take
turns, every second round backwards; figures are medians, and only ratios within one run mean
anything. The bench checks answers and receipts. The exit status is 1 if an answer is wrong, memory
is lost or a part failed; the other parts are measured all the same, and the output is written after
each part. --quick has fewer rounds. On the fake CUDA of the tests everything runs without times,
and --quick has small tensors.
"""
