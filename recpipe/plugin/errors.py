"""Every way a set of plugins can fail to fit together; each message carries the remedy."""

from recpipe.errors import UserError


class PluginError(UserError):
    """Base class of the faults below; also raised for a knob that a plugin does not take."""


class PluginNotFound(PluginError):
    """No installed distribution provides a plugin of this name."""


class PluginLoadError(PluginError):
    """A plugin is installed, but its module cannot be imported or is not a plugin."""


class PluginVersionError(PluginError):
    """A plugin was written for another plugin API or another TorchRec."""


class PluginConflict(PluginError):
    """Two plugins want the same thing, or one needs what another takes away."""


class PluginOrderError(PluginError):
    """The ``before`` and ``after`` of some links contradict each other."""


class PluginFault(PluginError):
    """A plugin's code raised what it must not; the message names plugin and part, ``__cause__`` is that."""
