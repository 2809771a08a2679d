"""A GPU for machines without one: CPU tensors that are said to be on it.

What a real one refuses, it refuses: operators on tensors of both devices, numpy arrays of a GPU's tensors,
page-locked copies of them. So code that forgets to move something ends in an error, each time. It computes
with the CPU's kernels, at once and in order: it shows nothing of CUDA's kernels, of streams or of NCCL.

``late.py`` shows the streams, on tensors of a CPU: copies are made as late as they may be. ``graph.py``
repeats operators as a CUDA graph repeats kernels.

``cuda.install()`` is for the life of a process; ``RECPIPE_GPU_SUITE=pretend`` asks tests/gpu for it.
"""
