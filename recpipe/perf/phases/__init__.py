"""The phases of a profiled step: the work of each, its measured time, and the least that it can take."""
