"""Servers of a model that is cut into shards, as a network of queues: how long requests take under a load."""
