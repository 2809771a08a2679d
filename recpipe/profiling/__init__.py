"""Phases of a profiled step by torch.profiler, the work of each, and the least time that it can take."""
