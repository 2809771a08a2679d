"""Which rows are looked up how often: samples, skew, access counts and the miss rates of caches."""
