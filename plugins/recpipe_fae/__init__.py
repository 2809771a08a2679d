"""FAE: a hot set of embedding rows, hot and cold mini-batches, and the Shuffle Scheduler."""
