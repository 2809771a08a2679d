"""The conformance tests that every plugin passes, ready to subclass: ``PluginSuite``."""

from recpipe.testing.runs import SMALL, Trained, train
from recpipe.testing.suite import PluginSuite

__all__ = ["SMALL", "PluginSuite", "Trained", "train"]
