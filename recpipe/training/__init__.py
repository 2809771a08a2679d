"""Lightning's loop as a recipe asks for it: the module and what it resumes from, trainer,
loggers, progress, signals, and what is recorded."""
