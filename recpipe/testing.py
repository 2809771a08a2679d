"""For authors of plugins: ``class TestAcme(PluginSuite): plugin = "acme"`` runs the conformance tests."""

from recpipe.plugin.testing import PluginSuite

__all__ = ["PluginSuite"]
