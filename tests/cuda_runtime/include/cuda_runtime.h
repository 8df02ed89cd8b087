/* What CuPy finds the folder of CUDA's headers by: compile.py has included all there is. */
