"""How fast a training step could be on this machine at best: its limits (machine), a batch's work (workload),
and from both the least time of each phase (roofline)."""
