"""The models of DeepRecSys that core has not: RMC, NCF and multi-task Wide & Deep."""
