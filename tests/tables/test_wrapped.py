"""A plugin's collection around the tables keeps what they can do, and nothing is turned off unseen."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from recpipe.config.compose import compose
from recpipe.plugin.api import Contribution, Plugin, TableClaim, TablePolicy
from recpipe.plugin.errors import PluginError
from recpipe.run import run
from recpipe.tables.capabilities import CAPABILITIES, Placed, Planned, SavedByRanks, SendsAhead
from recpipe.tables.collection import TableCollection
from recpipe.tables.wrapped import WrappedCollection
from recpipe.tasks.compare_run import parameter_difference

SMALL = (
    "data.samples=4000",
    "data.batch_size=128",
    "data.tables={a: 3000, b: 800, c: 50}",
    "model.embedding_dim=8",
    "tiers.resident_bytes=30%",
    "optim=rowwise_adagrad",
    "trainer.progress=false",
    "trainer.logger=null",
    "trainer.eval_every=1.0",
)
KINDS = {
    "resident": ("tiers.resident_bytes=100%",),
    "hotline": ("+plugin=hotline", "plugins.hotline.learn_batches=4", "plugins.hotline.min_micro_batch=8"),
    "lru": ("tiers.policy=lru", "tiers.store=ssd"),
    "sharded": ("tiers.sharded=true",),
}


class Counting(WrappedCollection):
    """Changes nothing."""

    updates = 0

    def update(self) -> None:
        Counting.updates += 1
        super().update()


class Halved(WrappedCollection):
    """Looks rows up at half their size, wherever they lie."""

    def forward(self, sparse: Any) -> Any:
        pooled = self.inner(sparse)
        pooled._values = pooled.values() / 2
        return pooled

    def lookup_resident(self, plan: Any) -> torch.Tensor:
        return super().lookup_resident(plan) / 2

    def lookup_slab(self, plan: Any) -> torch.Tensor:
        return super().lookup_slab(plan) / 2


class ForwardAlone(WrappedCollection):
    def forward(self, sparse: Any) -> Any:
        return self.inner(sparse)


class Around(TableCollection):
    """Passes rows on, and knows of nothing else."""

    def __init__(self, inner: TableCollection) -> None:
        super().__init__()
        self.inner = inner

    def regions(self) -> Iterator[Any]:
        return self.inner.regions()

    def read(self, region: Any) -> Any:
        return self.inner.read(region)

    def write(self, region: Any, values: Any) -> None:
        self.inner.write(region, values)


Wrap = Callable[[Callable[[TableCollection], Any]], tuple[str, ...]]


@pytest.fixture
def wrap(offer: Callable[[str, str, object], None]) -> Wrap:
    """``wrap(cls)``: overrides under which a plugin puts ``cls`` around the tables."""

    def overrides(cls: Callable[[TableCollection], Any]) -> tuple[str, ...]:
        class Policy(TablePolicy):
            def rewrite(self, module: Any, tables: Sequence[str]) -> Any:
                return cls(module)

        class Wraps(Plugin):
            api = (1, 0)

            def contribute(self, ctx: Any) -> Contribution:
                return Contribution(tables=[TableClaim("*", frozenset({"update"}), Policy())])

        offer("plugin", "wraps", Wraps)
        return ("+plugins.wraps={}",)

    return overrides


def train(folder: Path, *overrides: str) -> dict[str, Any]:
    export = f"task.export_parameters={folder / 'parameters'}"
    return run(compose([*SMALL, export, *overrides]), folder)


def apart(folder: Path, one: str, other: str) -> float:
    return parameter_difference(folder / one / "parameters", folder / other / "parameters")


@pytest.mark.parametrize("kind", KINDS)
def test_around_any_tables_nothing_changes(tmp_path: Path, wrap: Wrap, kind: str) -> None:
    """Tiers, micro-batches, and a checkpoint in the middle of the run."""
    recipe = (*KINDS[kind], "trainer.checkpoint_every=10")
    plain = train(tmp_path / "plain", *recipe)
    recipe = (*recipe, *wrap(Counting))
    Counting.updates = 0
    wrapped = train(tmp_path / "wrapped", *recipe)
    assert Counting.updates == wrapped["history"][-1]["step"]
    assert apart(tmp_path, "plain", "wrapped") == 0
    for part in ("io", "plugins"):
        ours, theirs = (_counts(report[part]) for report in (wrapped, plain))
        assert {name: ours[name] for name in theirs} == theirs
    if kind == "hotline":
        assert plain["plugins"]["hotline"]["split_batch_share"] > 0.5, "or the test shows nothing"
    saved = tmp_path / "wrapped" / "checkpoints" / "step-00000010.ckpt"
    train(tmp_path / "resumed", *recipe, f"resume={saved}")
    assert apart(tmp_path, "wrapped", "resumed") == 0


def _counts(part: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """What is no time, by dotted name."""
    found: dict[str, Any] = {}
    for name, value in part.items():
        if isinstance(value, dict):
            found |= _counts(value, f"{prefix}{name}.")
        elif not ("seconds" in name or name == "speedup_bound"):
            found[prefix + name] = value
    return found


@pytest.mark.parametrize("kind", ["resident", "hotline", "lru"])
def test_what_a_wrapper_changes_reaches_training(tmp_path: Path, wrap: Wrap, kind: str) -> None:
    recipe = (*KINDS[kind], "trainer.checkpoint_every=null")
    train(tmp_path / "plain", *recipe)
    train(tmp_path / "halved", *recipe, *wrap(Halved))
    assert apart(tmp_path, "plain", "halved") > 1e-4


@pytest.mark.parametrize(
    ("kind", "cls", "said"),
    [
        ("hotline", ForwardAlone, "looks rows up by lookup_resident and lookup_slab here; override them"),
        ("sharded", ForwardAlone, "looks rows up by finish here; override it"),
        ("hotline", Around, r"Around that cannot do what the tables could \(Planned, Placed\)"),
        ("sharded", Around, r"Around that cannot do what the tables could \(SendsAhead, SavedByRanks\)"),
    ],
)
def test_what_would_be_turned_off_or_gone_past_is_refused(
    tmp_path: Path, wrap: Wrap, kind: str, cls: Callable[[TableCollection], Any], said: str
) -> None:
    with pytest.raises(PluginError, match=rf"plugin wraps .*{said}"):
        train(tmp_path, *KINDS[kind], *wrap(cls))


def test_a_wrapper_offers_what_is_inside_and_no_more() -> None:
    class Bare(Around):
        def __init__(self) -> None:
            TableCollection.__init__(self)

    class Sends(Bare, SendsAhead):
        def start(self, sparse: Any) -> Any:
            return "sent"

        def finish(self, sent: Any) -> Any:
            return sent

    assert [WrappedCollection(Bare()).offers(c) for c in CAPABILITIES] == [None] * len(CAPABILITIES)
    sends = Sends()
    twice = WrappedCollection(WrappedCollection(sends))
    assert twice.offers(SendsAhead) is twice
    assert twice.start(None) == "sent"
    assert twice.offers(Sends) is sends, "a class that no wrapper is: the inner collection itself"
    assert [twice.offers(c) for c in (Planned, Placed, SavedByRanks)] == [None] * 3
