"""How fast a training step could be at best here: the machine's limits (machine), a batch's work (workload),
and from both the least time of each phase (roofline)."""
