"""Running the merged parts, and who is blamed for a fault in one."""

from __future__ import annotations

import json
from contextlib import contextmanager, suppress

import pytest

from recpipe.plugin.api import Context, Contribution, Invariant, Link
from recpipe.plugin.assembly import assemble, gather
from recpipe.plugin.errors import PluginError, PluginFault
from recpipe.tasks.plugins import SAMPLE
from tests.plugin.samples import ACME, HOTLINE, TABLES, Good, Shuffles, merged

BLAMED = r"plugin acme \(recpipe-acme 2.3.0\), part acme"


def boom(*_):
    raise ZeroDivisionError("x")


def test_batches_pass_the_chains_in_order() -> None:
    def times(n):
        return Link(lambda batches: (b * n for b in batches))

    def plus(n):
        return Link(lambda batch: batch + n)

    both = merged(
        (HOTLINE, Contribution(stream=[times(10)], batch=[plus(1)])), (ACME, Contribution(batch=[plus(2)]))
    )
    (stream,), batch = both.feed.stream, both.feed.batch
    assert list(stream.part(iter([1, 2]))) == [10, 20]  # type: ignore
    assert [link.part(1) for link in batch] == [2, 3]  # type: ignore


def test_step_wrappers_nest_the_first_outermost() -> None:
    events = []

    def wrapper(name):
        @contextmanager
        def around(batch):
            events.append(f"{name} in {batch}")
            yield
            events.append(f"{name} out")

        return Link(around)

    both = merged((HOTLINE, Contribution(step=[wrapper("h")])), (ACME, Contribution(step=[wrapper("a")])))
    with both.around_step("b"):  # type: ignore[arg-type]
        events.append("step")
    assert events == ["h in b", "a in b", "step", "a out", "h out"]


def test_fault_in_a_transform_names_the_plugin() -> None:
    (link,) = merged((ACME, Contribution(batch=[Link(boom, "split")]))).feed.batch
    with pytest.raises(PluginFault, match=BLAMED + r"\.split, raised ZeroDivisionError: x"):
        link.part(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrap", [boom, lambda batches: map(boom, batches)])
def test_fault_in_a_stream_names_the_plugin(wrap) -> None:
    (link,) = merged((ACME, Contribution(stream=[Link(wrap)]))).feed.stream
    with pytest.raises(PluginFault, match=BLAMED + r"\.stream, raised ZeroDivisionError: x"):
        list(link.part(iter([1])))  # type: ignore


def test_fault_of_the_data_blames_no_plugin() -> None:
    (link,) = merged((ACME, Contribution(stream=[Link(lambda b: b)]))).feed.stream
    with pytest.raises(ZeroDivisionError):
        list(link.part(map(boom, [1])))  # type: ignore


def test_fault_of_the_step_blames_no_plugin_but_its_wrapper_does() -> None:
    @contextmanager
    def fine(batch):
        yield

    @contextmanager
    def swallows(batch):
        with suppress(ZeroDivisionError):
            yield

    @contextmanager
    def bad(batch):
        yield
        boom()

    for wrapper, body, expected in (
        (fine, boom, ZeroDivisionError),
        (swallows, boom, ZeroDivisionError),
        (bad, lambda: None, PluginFault),
        (boom, lambda: None, PluginFault),
    ):
        around = merged((ACME, Contribution(step=[Link(wrapper)]))).around_step(None)  # type: ignore
        with pytest.raises(expected), around:
            body()


def test_contribute_must_return_a_contribution() -> None:
    class Wrong(Good):
        def contribute(self, ctx: Context) -> Contribution:
            return None  # type: ignore[return-value]

    with pytest.raises(PluginError, match=r"acme \(.*\): contribute\(\) returned None, not a Contribution"):
        gather([(ACME, Wrong())], SAMPLE)


def test_to_dict_says_who_owns_what() -> None:
    active = [(ACME, Shuffles(), Contribution(batch=[Link(boom, "remap")]))]
    described = assemble(active, TABLES).to_dict()
    assert json.loads(json.dumps(described)) == described
    assert described["plugins"] == [{"name": "acme", "distribution": "recpipe-acme", "version": "2.3.0"}]
    assert described["batch"] == ["acme.remap"]
    unnamed = Contribution(batch=[Link(boom)], step=[Link(boom), Link(boom, "other")])
    parts = assemble([(ACME, Shuffles(), unnamed)], TABLES).to_dict()
    assert (parts["batch"], parts["step"]) == (["acme.batch"], ["acme.step", "acme.other"])
    assert described["altered"] == [Invariant.SAMPLE_ORDER.name]
