"""A finished model in low precision: types for its tables under a bound on the loss of normalized entropy."""
