"""Lightning's Trainer asks the environment for each of its arguments, which it lists anew each time.

No test sets one there.
"""

from __future__ import annotations

from argparse import Namespace

import pytest
from lightning.pytorch.utilities import argparse


def leave_environment(patch: pytest.MonkeyPatch) -> None:
    """Until ``patch`` ends."""
    patch.setattr(argparse, "_parse_env_variables", lambda cls, template="": Namespace())
