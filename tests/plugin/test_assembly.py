"""Running the merged parts, and who is blamed for a fault in one."""

from __future__ import annotations

import json
from contextlib import contextmanager

import pytest

from recpipe.plugin.api import Context, Contribution, Invariant, Link
from recpipe.plugin.assembly import assemble, gather
from recpipe.plugin.errors import PluginError
from recpipe.tasks.plugins import SAMPLE
from tests.plugin.samples import ACME, HOTLINE, TABLES, Good, Shuffles, merged

NOTE = "raised inside plugin acme (recpipe-acme 2.3.0), part acme"


def boom(*_):
    raise ZeroDivisionError("x")


def notes(caught) -> list[str]:
    return getattr(caught.value, "__notes__", [])


def test_batches_pass_the_chains_in_order() -> None:
    def times(n):
        return Link(lambda batches: (b * n for b in batches))

    def plus(n):
        return Link(lambda batch: batch + n)

    both = merged(
        (HOTLINE, Contribution(stream=[times(10)], batch=[plus(1)])), (ACME, Contribution(batch=[plus(2)]))
    )
    assert list(both.feed.wrap_stream(iter([1, 2]))) == [10, 20]  # type: ignore
    assert both.feed.transform(1) == 4  # type: ignore


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
    with pytest.raises(ZeroDivisionError) as caught:
        merged((ACME, Contribution(batch=[Link(boom, "split")]))).feed.transform(None)  # type: ignore[arg-type]
    assert notes(caught) == [NOTE + ".split"]


@pytest.mark.parametrize("wrap", [boom, lambda batches: map(boom, batches)])
def test_fault_in_a_stream_names_the_plugin(wrap) -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        list(merged((ACME, Contribution(stream=[Link(wrap)]))).feed.wrap_stream(iter([1])))  # type: ignore
    assert notes(caught) == [NOTE]


def test_fault_of_the_data_blames_no_plugin() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        list(merged((ACME, Contribution(stream=[Link(lambda b: b)]))).feed.wrap_stream(map(boom, [1])))  # type: ignore
    assert notes(caught) == []


def test_fault_of_the_step_blames_no_plugin_but_its_wrapper_does() -> None:
    @contextmanager
    def fine(batch):
        yield

    @contextmanager
    def bad(batch):
        yield
        boom()

    for wrapper, body, expected in (
        (fine, boom, []),
        (bad, lambda: None, [NOTE]),
        (boom, lambda: None, [NOTE]),
    ):
        around = merged((ACME, Contribution(step=[Link(wrapper)]))).around_step(None)  # type: ignore
        with pytest.raises(ZeroDivisionError) as caught, around:
            body()
        assert notes(caught) == expected


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
    assert described["altered"] == [Invariant.SAMPLE_ORDER.name]
