"""The five laws: slot, keyed and claims, chain, sum, fan-out; and the messages of their conflicts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from recpipe.plugin.api import Contribution, Link
from recpipe.plugin.assembly import gather
from recpipe.plugin.errors import PluginConflict, PluginError, PluginOrderError
from recpipe.plugin.policy import Cache
from recpipe.plugin.quantizer import Quantizer
from tests.plugin.samples import ACME, BAGPIPE, HOTLINE, RUN, Good, Splits, merged


def split(batch, mask):
    return None


def same(x):
    return x


class Kept(Cache):
    def __init__(self, tables: str = "*", fallback: bool = False) -> None:
        self.tables, self.fallback = tables, fallback

    def policy(self, space):
        raise ZeroDivisionError("x")


def stored(kind: str) -> Contribution:
    class Stored(Quantizer):
        def storage(self, table):
            return kind

    return Contribution(quantizer=Stored())


def cache(tables: str, fallback: bool = False) -> Contribution:
    return Contribution(cache=[Kept(tables, fallback)])


def labels(chain) -> list[str]:
    return [link.label for link in chain]


def test_slot_has_one_owner() -> None:
    assert merged((HOTLINE, Contribution())).splitter is None
    alone = merged((HOTLINE, Contribution(splitter=split)), (BAGPIPE, Contribution()))
    assert alone.splitter is not None
    assert alone.splitter.origin == HOTLINE
    both = [(HOTLINE, Contribution(splitter=split)), (ACME, Contribution(splitter=split))]
    with pytest.raises(
        PluginConflict,
        match=r"hotline \(recpipe 0.1.0\) and acme \(recpipe-acme 2.3.0\) both want to be the splitter; "
        r"only one can. Drop one, or say which: compose.prefer.splitter=hotline",
    ):
        merged(*both)
    chosen = merged(*both, prefer={"splitter": "acme"}).splitter
    assert chosen is not None
    assert chosen.origin == ACME


def test_preferences_that_mean_nothing_are_refused() -> None:
    both = [(HOTLINE, Contribution(splitter=split)), (ACME, Contribution(splitter=split))]
    with pytest.raises(
        PluginConflict, match=r"compose.prefer.spliter: no such slot. Did you mean 'splitter'"
    ):
        merged(*both, prefer={"spliter": "acme"})
    with pytest.raises(PluginConflict, match="'bagpipe' brings no splitter.*that bring one: hotline, acme"):
        merged(*both, prefer={"splitter": "bagpipe"})


def test_plugins_share_a_table_but_not_an_aspect() -> None:
    hot, precise = (HOTLINE, cache("t_cat_*")), (ACME, stored("fp16"))
    owners = merged(hot, precise).to_dict()["tables"]
    assert owners["t_cat_0"] == {"cache": "hotline", "storage": "acme"}
    assert owners["user_id"] == {"storage": "acme"}
    with pytest.raises(
        PluginConflict,
        match=r"hotline \(.*\) and bagpipe \(.*\) both claim the cache of table 't_cat_1'.*Drop one",
    ):
        merged(hot, precise, (BAGPIPE, cache("t_cat_1")))
    with pytest.raises(
        PluginConflict, match="claims tables 'x\\*', but the model has: t_cat_0, t_cat_1, user_id"
    ):
        merged((HOTLINE, cache("x*")))


def test_a_fallback_is_for_tables_that_nobody_else_has_claimed() -> None:
    caches = merged((ACME, cache("*", fallback=True)), (HOTLINE, cache("t_*"))).caches
    assert {table: owner.origin.plugin for table, owner in caches.items()} == {
        "t_cat_0": "hotline",
        "t_cat_1": "hotline",
        "user_id": "acme",
    }


@pytest.mark.parametrize("part", ["planner", "splitter", "skipper", "quantizer"])
def test_what_is_not_of_its_kind_is_refused(part: str) -> None:
    class Wrong(Good):
        def contribute(self, ctx):
            return Contribution(**{part: same})

    with pytest.raises(
        PluginError, match=rf"acme .*Contribution.{part} is .*no recpipe.plugin.{part.title()}"
    ):
        gather([(ACME, Wrong())], None)


def test_a_fault_of_a_cache_names_the_plugin() -> None:
    owner = merged((ACME, cache("*"))).caches["user_id"]
    said = r"acme \(recpipe-acme 2.3.0\), part acme.Kept.policy, raised ZeroDivisionError"
    with pytest.raises(PluginError, match=said):
        owner.call(Cache.policy, None)


@pytest.mark.parametrize("swap", [False, True])
def test_chain_order(swap: bool) -> None:
    parts = [
        (
            HOTLINE,
            Contribution(
                batch=[Link(same, "b", before=("bagpipe",)), Link(same, "a", before=("hotline.b",))]
            ),
        ),
        (BAGPIPE, Contribution(batch=[Link(same, "prefetch", after=("hotline",))])),
    ]
    assert labels(merged(*parts[:: -1 if swap else 1]).feed.batch) == [
        "hotline.a",
        "hotline.b",
        "bagpipe.prefetch",
    ]


def test_chain_ties_keep_the_plugin_list_and_absent_names_order_nothing() -> None:
    a, b = Contribution(step=[Link(same, after=("absent",))]), Contribution(step=[Link(same)])
    assert labels(merged((HOTLINE, a), (ACME, b)).step) == ["hotline.step", "acme.step"]
    assert labels(merged((ACME, b), (HOTLINE, a)).step) == ["acme.step", "hotline.step"]


def test_contradicting_order_prints_the_loop() -> None:
    with pytest.raises(PluginOrderError, match="the order of batch contradicts itself: .*bagpipe.*hotline"):
        merged(
            (HOTLINE, Contribution(batch=[Link(same, after=("bagpipe",))])),
            (BAGPIPE, Contribution(batch=[Link(same, after=("hotline",))])),
        )


def test_links_of_one_plugin_need_names() -> None:
    with pytest.raises(PluginConflict, match="adds 'acme.stream' to stream twice; give each link a name"):
        merged((ACME, Contribution(stream=[Link(same), Link(same)])))


def test_a_plugin_is_told_what_it_did_itself() -> None:
    told = {}

    def of(name):
        def report(run):
            told[name] = run
            return {}

        return Contribution(splitter=Splits(same), report=[report])

    cut = replace(RUN, split_batches=5, splitting="it paid", before_cold_seconds=1.0, after_cold_seconds=2.0)
    both = merged((HOTLINE, of("hotline")), (ACME, of("acme")), prefer={"splitter": "acme"})
    both.figures(cut)
    assert told["acme"] == replace(cut, fills=frozenset({"splitter"}))
    assert told["hotline"] == RUN


def test_reports_fan_out_under_their_plugin() -> None:
    one, two = (
        Contribution(report=[lambda run: {"a": run.steps}, lambda _: {"b": 2}]),
        Contribution(report=[lambda _: {"a": 3}]),
    )
    assert merged((HOTLINE, one), (ACME, two), (BAGPIPE, Contribution())).figures(RUN) == (
        {"hotline": {"a": 7, "b": 2}, "acme": {"a": 3}, "bagpipe": {}},
        {},
    )
    twice = merged((ACME, Contribution(report=[lambda _: {"a": 1}, lambda _: {"a": 2}])))
    found, faults = twice.figures(RUN)
    assert found == {"acme": {"a": 1}}
    assert "acme (recpipe-acme 2.3.0) reports 'a' twice" in faults["acme"]
