"""SDM: serving with the rows of user-side tables on an SSD (Ardestani et al., arXiv 2110.11489)."""
