"""The micro-benchmarks that a machine's profile is made of, a file for each family."""
