"""Running the merged parts, and who is blamed for a fault in one."""

from __future__ import annotations

import json
from contextlib import contextmanager, suppress
from dataclasses import fields

import lightning as L
import pytest

from recpipe.plugin.api import Contribution, EpochOrder, Invariant, Link
from recpipe.plugin.assembly import assemble, gather
from recpipe.plugin.context import Context
from recpipe.plugin.errors import PluginError, PluginFault
from recpipe.plugin.planner import Planner
from recpipe.plugin.quantizer import Quantizer
from recpipe.tasks.plugins import SAMPLE
from tests.plugin.samples import ACME, HOTLINE, TABLES, Good, Leaves, Shuffles, Splits, merged
from tests.plugin.test_laws import Kept
from tests.plugin.test_skipper import Keeps

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


def test_every_part_is_shown_with_its_plugin() -> None:
    class Order(EpochOrder):
        def __len__(self):
            return 1

        def batches(self, first):
            return iter(())

    class Codes(Quantizer):
        def storage(self, table):
            return "fp16" if table.name == "user_id" else None

        def codecs(self):
            return {("rows", "forward"): self}

    class Half(Kept):
        pass

    class Watch(L.Callback):
        pass

    contribution = Contribution(
        order=Order(),
        stream=[Link(boom)],
        batch=[Link(boom, "remap")],
        planner=Planner(),
        cache=[Kept("t_*"), Half("*", fallback=True)],
        splitter=Splits(boom),
        skipper=Keeps(),
        quantizer=Codes(),
        step=[Link(boom)],
        callbacks=[Watch()],
        report=[boom],
    )
    found = assemble([(ACME, Leaves(), contribution)], TABLES)
    shown = {f.name: f"{f.name} (acme.{f.name})" for f in fields(Contribution)} | {
        "order": "order (acme.Order)",
        "batch": "batch (acme.remap)",
        "planner": "planner (acme.Planner)",
        "cache": "cache (acme.Kept, acme.Half)",
        "splitter": "splitter (acme.Splits)",
        "skipper": "skipper (acme.Keeps)",
        "quantizer": "quantizer (acme.Codes: storage, codecs)",
        "callbacks": "callbacks (acme.Watch)",
    }
    assert found.points() == list(shown.values())
    assert found.to_dict()["parts"] == {
        **{"order": "acme.Order", "splitter": "acme.Splits", "skipper": "acme.Keeps"},
        "planner": "acme.Planner",
        "cache": {"acme.Kept": ["t_cat_0", "t_cat_1"], "acme.Half": ["user_id"]},
        "storage": {"acme.Codes": ["user_id"]},
        "codecs": {"acme.Codes": ["rows.forward"]},
    }
    nothing = assemble([(ACME, Good(), Contribution())], TABLES)
    assert (nothing.points(), nothing.to_dict()["parts"]) == ([], {})
