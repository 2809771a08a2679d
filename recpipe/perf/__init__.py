"""What a training step costs: a machine measured once, and the time of steps predicted from that."""
