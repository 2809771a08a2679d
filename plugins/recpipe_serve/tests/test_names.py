"""Names that were in ``recpipe.kit`` and ``recpipe.plugin``: packages written before import on."""

from __future__ import annotations

import importlib

import pytest
import recpipe_low_precision
import recpipe_serve

from recpipe import kit, plugin

OF_CONTRACT = {"FinishedModel", "ModelQuantizer", "Quantized", "ReportSection", "RowServer"}


@pytest.mark.parametrize("package", [recpipe_serve, recpipe_low_precision], ids=lambda m: m.__name__)
def test_every_name_is_found_where_it_was(package) -> None:
    for name, place in package.NAMES.items():
        module, _, attribute = place.partition(":")
        value = getattr(importlib.import_module(module), attribute)
        with pytest.warns(DeprecationWarning, match=f"{name} is {module}.{attribute} now"):
            assert getattr(plugin if name in OF_CONTRACT else kit, name) is value
        assert getattr(package, name) is value
    assert set(package.__all__) <= set(package.NAMES)


def test_no_other_name_is_found() -> None:
    for package in (recpipe_serve, recpipe_low_precision):
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            getattr(package, "nothing")  # noqa: B009
