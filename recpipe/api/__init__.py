"""The door for Python: training, and what a finished model is for. Importing it does not import torch."""

from recpipe.api.answers import evaluate, load, package, predict, quantize
from recpipe.api.training import Run, place, train

__all__ = ["Run", "evaluate", "load", "package", "place", "predict", "quantize", "train"]
