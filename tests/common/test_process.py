"""What the garbage collector looks at."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from recpipe.common import process
from recpipe.common.process import importing, old_objects_kept


class Circle:
    """An object that only the garbage collector removes."""

    def __init__(self) -> None:
        self.itself = self


def circle() -> weakref.ref[Circle]:
    return weakref.ref(Circle())


@pytest.fixture
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As in a process of its own; conftest.py has frozen what it imported."""
    monkeypatch.setattr(process, "_kept", False)
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@contextmanager
def importing_one(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """``importing`` a module."""
    with importing():
        patch.setitem(sys.modules, f"imported{len(sys.modules)}", ModuleType("imported"))
        yield


@pytest.mark.usefixtures("nothing_frozen")
def test_what_is_imported_stays_and_what_comes_later_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    with importing_one(monkeypatch):
        imported = circle()
        assert not gc.isenabled()
    later = circle()
    gc.collect()
    assert imported() is not None
    assert later() is None
    assert gc.isenabled()


@pytest.mark.usefixtures("nothing_frozen")
def test_where_all_has_been_imported_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the second job of a sweep: what the first has left is collected."""
    with importing_one(monkeypatch):
        pass
    left = circle()
    with importing():
        pass
    gc.collect()
    assert left() is None


@pytest.mark.usefixtures("nothing_frozen")
def test_a_failed_import_leaves_the_collector_on() -> None:
    with pytest.raises(ImportError, match="torch"), importing():
        raise ImportError("torch")
    assert gc.isenabled()


@pytest.mark.usefixtures("nothing_frozen")
def test_a_collector_that_is_off_stays_off() -> None:
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.usefixtures("nothing_frozen")
def test_old_objects_are_collected_after_the_block() -> None:
    old = circle()
    with old_objects_kept():
        new = circle()
        gc.collect()
        assert old() is not None
        assert new() is None
    gc.collect()
    assert old() is None


@pytest.mark.usefixtures("nothing_frozen")
def test_where_imports_are_kept_the_block_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with importing_one(monkeypatch):
        imported = circle()
    with old_objects_kept():
        pass
    gc.collect()
    assert imported() is not None
