"""Everything that waits for a GPU, in one command: ``python -m bench.gpu_day --help``.

Runs, one after another and each with a limit of its own: trials of the driver, `shmserve doctor`,
what `python -m bench.gpu` measures, the deaths of clients and executors, rounds, ONNX Runtime and
torch on the GPU, and the tests of CUDA. One that fails, hangs or is not possible here costs no
other. The report, report.json and report.html, says of every claim of docs/gpu.md whether it
passed, failed or was not run, and why, with its number.

Exit status: 0 all claims passed; 1 one, or a step, has failed; 3 neither, but some were
not run.
On the fake of CUDA, and on the stand-in for its runtime, all that can run does, and nothing is
timed.
"""
