"""Every plugin that trains on a GPU, through its own conformance suite there."""

from __future__ import annotations

import recpipe_bagpipe.tests.test_plugin as bagpipe
import recpipe_fae.tests.test_plugin as fae
import recpipe_hotline.tests.test_plugin as hotline
import recpipe_neo.tests.test_neo_plugin as neo
import recpipe_quantize.tests.test_quantize_plugin as quantize
import recpipe_slipstream.tests.test_plugin as slipstream
from recpipe_neo.tests.test_neo_plugin import _few_measurements

from tests.gpu.conftest import WORDS

__all__ = ["_few_measurements"]


class TestHotline(hotline.TestHotline):
    overrides = (*hotline.TestHotline.overrides, *WORDS)
    ranks = 1


class TestFae(fae.TestFAE):
    overrides = (*fae.TestFAE.overrides, *WORDS)
    ranks = 1


class TestSlipstream(slipstream.TestSlipstream):
    overrides = (*slipstream.TestSlipstream.overrides, *WORDS)
    ranks = 1


class TestBagPipe(bagpipe.TestBagPipe):
    overrides = (*bagpipe.TestBagPipe.overrides, *WORDS)
    ranks = 1


class TestQuantize(quantize.TestQuantize):
    overrides = (*quantize.TestQuantize.overrides, *WORDS)
    ranks = 1


class TestNeo(neo.TestNeo):
    overrides = (*neo.TestNeo.overrides, *WORDS)
    ranks = 1
