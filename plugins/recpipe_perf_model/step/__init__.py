"""A step with all rows in memory: captured from the model, made into tasks, walked, predicted."""
