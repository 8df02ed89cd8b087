"""What a GPU adds, in one run: ``python -m bench.gpu --help``.

    copies   host to device and back: `Device.bring` and `take_out` on a segment of 64 MiB as an
             executor maps it, beside bare copies (cudaMemcpyAsync) of memory of cudaHostAlloc
    regions  adding 1 on the GPU to 1, 16, 64 and 256 MiB: in place in a CUDA region, from and to a
             system region, and with the tensor in ModelInfer messages and in binary HTTP bodies
    overlap  two callers of an instance that computes for about as long as its input's copy takes,
             beside one caller
    deaths   a client that is killed -9 while its memory is registered: when it is back, and
             whether others notice
    executors  an executor that is killed -9 while it has the GPU's memory: when that is back, and
             when another one answers
    rounds   register, infer, unregister, 10,000 times over HTTP and over gRPC, or as often as that
             goes in a limited time: the device's free memory before and after

The bench is the client: its memory is opened by the server's executors, other processes.
Contestants take turns, every second round backwards; medians; only ratios within one run mean
anything. Answers and receipts are checked: exit status 1 if one is wrong, memory is lost or a part
failed; the others are measured all the same, and the output is written after each. --quick has
fewer rounds. On the fake CUDA of the tests everything runs, but nothing is timed, and --quick has
small tensors.
"""
