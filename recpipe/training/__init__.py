"""Lightning's loop as a recipe asks for it: trainer, loggers, progress, signals, and what is recorded."""
