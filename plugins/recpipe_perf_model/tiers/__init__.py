"""A step whose rows are in tiers, on one rank or on several: the work of moving rows, and its prediction."""
