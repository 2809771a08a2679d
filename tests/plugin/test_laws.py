"""The five laws: slot, keyed and claims, chain, sum, fan-out; and the messages of their conflicts."""

from __future__ import annotations

import re

import pytest

from recpipe.plugin.api import Contribution, Link, TableClaim, TablePolicy
from recpipe.plugin.errors import PluginConflict, PluginError, PluginOrderError
from tests.plugin.samples import ACME, BAGPIPE, HOTLINE, RUN, merged


def split(batch, mask):
    return None


def same(x):
    return x


class Able(TablePolicy):
    """Carries out every aspect, in a way."""

    def constrain(self, name, table):
        return None

    def rewrite(self, module, tables):
        return module

    def collection(self, parts):
        return None


def claim(glob: str, *aspects: str, policy: TablePolicy | None = None) -> Contribution:
    return Contribution(tables=[TableClaim(glob, frozenset(aspects), policy or Able())])


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
    hot, precise = (HOTLINE, claim("t_cat_*", "cache")), (ACME, claim("*", "precision"))
    owners = merged(hot, precise).to_dict()["tables"]
    assert owners["t_cat_0"] == {"cache": "hotline", "precision": "acme"}
    assert owners["user_id"] == {"precision": "acme"}
    with pytest.raises(
        PluginConflict,
        match=r"hotline \(.*\) and bagpipe \(.*\) both claim the cache of table 't_cat_1'.*one policy",
    ):
        merged(hot, precise, (BAGPIPE, claim("t_cat_1", "placement", "cache")))
    with pytest.raises(
        PluginConflict,
        match=r"acme \(.*\) and bagpipe \(.*\) both claim the precision of table 't_cat_1'.*bagpipe.tables",
    ):
        merged(precise, (BAGPIPE, claim("t_cat_1", "precision")))
    with pytest.raises(
        PluginConflict, match="claims tables 'x\\*', but the model has: t_cat_0, t_cat_1, user_id"
    ):
        merged((HOTLINE, claim("x*", "cache")))


def test_one_plugin_claims_an_aspect_once() -> None:
    twice = Contribution(tables=[*claim("*", "cache").tables, *claim("user_*", "cache").tables])
    with pytest.raises(PluginConflict, match="claims the cache of table 'user_id' twice"):
        merged((HOTLINE, twice))


def test_policies_group_tables_by_owner() -> None:
    groups = merged((ACME, claim("user_id", "cache")), (HOTLINE, claim("t_*", "cache"))).policies("cache")
    assert [(owner.origin.plugin, tables) for owner, tables in groups] == [
        ("acme", ("user_id",)),
        ("hotline", ("t_cat_0", "t_cat_1")),
    ]


@pytest.mark.parametrize(
    ("aspect", "methods"),
    [
        ("cache", "cache() or collection()"),
        ("placement", "constrain()"),
        ("kernel", "constrain()"),
        ("precision", "data_type() or rewrite()"),
        ("update", "rewrite()"),
    ],
)
def test_a_claim_without_the_method_is_refused(aspect: str, methods: str) -> None:
    said = f"acme (recpipe-acme 2.3.0) claims the {aspect} of tables 't_*', but its TablePolicy overrides no "
    with pytest.raises(PluginError, match=re.escape(f"{said}{methods}; bring one or drop the aspect")):
        merged((ACME, claim("t_*", aspect, policy=TablePolicy())))


def test_an_aspect_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PluginError, match="claims 'precison' .*no aspect. Did you mean 'precision'"):
        merged((ACME, claim("*", "precison")))


def test_a_cache_claim_that_brings_no_cache_says_so() -> None:
    [(owner, _)] = merged((ACME, claim("*", "cache"))).policies("cache")
    with pytest.raises(PluginError, match="claims 'cache' but brings no cache") as caught:
        owner.part.cache(None)  # type: ignore[arg-type]
    assert "raised inside plugin acme (recpipe-acme 2.3.0), part tables.cache" in caught.value.__notes__


def test_two_sharders_for_one_module_type() -> None:
    with pytest.raises(PluginConflict, match="both bring the sharder of int. Drop one"):
        merged((HOTLINE, Contribution(sharders={int: 1})), (ACME, Contribution(sharders={int: 2})))  # type: ignore


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
    assert labels(merged(*parts[:: -1 if swap else 1]).batch) == [
        "hotline.a",
        "hotline.b",
        "bagpipe.prefetch",
    ]


def test_chain_ties_keep_the_plugin_list_and_absent_names_order_nothing() -> None:
    a, b = Contribution(step=[Link(same, after=("absent",))]), Contribution(step=[Link(same)])
    assert labels(merged((HOTLINE, a), (ACME, b)).step) == ["hotline", "acme"]
    assert labels(merged((ACME, b), (HOTLINE, a)).step) == ["acme", "hotline"]


def test_contradicting_order_prints_the_loop() -> None:
    with pytest.raises(PluginOrderError, match="the order of batch contradicts itself: .*bagpipe.*hotline"):
        merged(
            (HOTLINE, Contribution(batch=[Link(same, after=("bagpipe",))])),
            (BAGPIPE, Contribution(batch=[Link(same, after=("hotline",))])),
        )


def test_links_of_one_plugin_need_names() -> None:
    with pytest.raises(PluginConflict, match="adds 'acme' to stream twice; give each link a name"):
        merged((ACME, Contribution(stream=[Link(same), Link(same)])))


def test_device_bytes_must_fit() -> None:
    two = [(HOTLINE, Contribution(device_bytes=3000)), (BAGPIPE, Contribution(device_bytes=2000))]
    assert merged(*two, resident_bytes=5000).device_bytes == 5000
    with pytest.raises(
        PluginConflict, match=r"ask for 5,000 bytes.*is 4,999 \(hotline .*: 3,000, bagpipe .*: 2,000\)"
    ):
        merged(*two, resident_bytes=4999)


def test_reports_fan_out_under_their_plugin() -> None:
    one, two = (
        Contribution(report=[lambda run: {"a": run.steps}, lambda _: {"b": 2}]),
        Contribution(report=[lambda _: {"a": 3}]),
    )
    assert merged((HOTLINE, one), (ACME, two), (BAGPIPE, Contribution())).figures(RUN) == {
        "hotline": {"a": 7, "b": 2},
        "acme": {"a": 3},
        "bagpipe": {},
    }
    with pytest.raises(PluginError, match="acme .* reports 'a' twice"):
        merged((ACME, Contribution(report=[lambda _: {"a": 1}, lambda _: {"a": 1}]))).figures(RUN)
