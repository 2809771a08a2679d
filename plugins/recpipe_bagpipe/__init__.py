"""BagPipe (Agarwal et al., SOSP 2023): caching by looking ahead in the stream of batches."""
