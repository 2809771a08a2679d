"""Training on machines that are not here: throughput and time to quality on hosts x GPUs, on paper."""
