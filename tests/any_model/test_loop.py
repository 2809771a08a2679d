"""``recpipe.place``: loops that recpipe does not run, against the same loop with plain modules."""

from __future__ import annotations

import gc
import runpy
import weakref

import lightning as L
import pytest
import torch
from torch import nn

import recpipe
from recpipe.backend.chain import is_converted
from recpipe.data.dataset import Dataset
from recpipe.errors import UserError
from recpipe.plugin.errors import PluginError
from recpipe.tables.group_rows import GroupRows
from tests.any_model.runs import left_by
from tests.any_model.zoo import (
    OPTIMIZERS,
    OVERRIDES,
    Events,
    Trained,
    by_hand,
    events,
    furthest,
    loss_of,
    make,
)
from tests.processes import ROOT

TECHNIQUES = {
    "resident": ("tiers.policy=resident",),
    "lru": ("tiers.policy=lru", "tiers=ssd"),
    "bagpipe": ("+plugin=bagpipe", "plugins.bagpipe.lookahead=4", "tiers.resident_bytes=90%"),
    "hotline": (
        "+plugin=hotline",
        "trainer.split=always",
        "plugins.hotline.min_micro_batch=1",
        "plugins.hotline.learn_batches=2",
    ),
}


@pytest.fixture(scope="module")
def batches(criteo: Dataset) -> list[Events]:
    return events(criteo, 6)


def overrides(optimizer: str, technique: str) -> tuple[str, ...]:
    return ("tiers.resident_bytes=20%", *OVERRIDES[optimizer], *TECHNIQUES[technique])


def own_loop(model: nn.Module, batches: list[Events], optimizer: str, technique: str, *more: str) -> Trained:
    """What a user writes: two epochs, with an evaluation after each."""
    losses = []
    with recpipe.place(model, batches, *overrides(optimizer, technique), *more) as placed:
        dense = OPTIMIZERS[optimizer][1](model.parameters())
        for _ in range(2):
            for batch in placed.loader:
                loss, _ = model(batch)
                dense.zero_grad()
                loss.backward()
                dense.step()
                losses.append(float(loss.detach()))
            with torch.no_grad():
                model(batches[0].to(next(model.parameters()).device))
        return left_by(model, losses)


@pytest.mark.parametrize("technique", TECHNIQUES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_loop_of_ones_own_trains_as_with_plain_modules(batches, technique, optimizer) -> None:
    mine = own_loop(make("two_tower"), batches, optimizer, technique)
    theirs = by_hand(make("two_tower"), batches * 2, optimizer)
    assert furthest(mine, theirs) < (1e-6 if optimizer == "sgd" else 1e-5)
    torch.testing.assert_close(torch.tensor(mine.losses), torch.tensor(theirs.losses), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("technique", ["resident", "hotline"])
@pytest.mark.parametrize("backend", ["cpu", "plain"])
def test_the_back_end_computes_the_same_under_the_same_names(batches, technique, backend) -> None:
    """Two towers whose layers are converted, or not; their state is that of the plain class."""
    model = make("two_tower")
    mine = own_loop(model, batches, "rowwise_adagrad", technique, f"trainer.backend={backend}")
    assert not any(map(is_converted, model.modules()))  # it is over
    theirs = by_hand(make("two_tower"), batches * 2, "rowwise_adagrad")
    assert furthest(mine, theirs) < 1e-5
    make("two_tower").load_state_dict(mine.parameters, strict=True)


@pytest.mark.parametrize("name", ["dlrm", "dcn", "deepfm", "din"])
def test_layers_and_interactions_are_converted(batches, name) -> None:
    """By the back end's kernels alone: every parameter as with plain modules."""
    model = make(name)
    words = ("tiers.policy=lru", *OVERRIDES["rowwise_adagrad"], "trainer.backend=cpu")
    with recpipe.place(model, batches, "tiers.resident_bytes=20%", *words) as placed:
        assert any(map(is_converted, model.modules()))
        dense = OPTIMIZERS["rowwise_adagrad"][1](model.parameters())
        for batch in placed.loader:
            loss = loss_of(model, batch)
            dense.zero_grad()
            loss.backward()
            dense.step()
        mine = left_by(model)
    make(name).load_state_dict(mine.parameters, strict=True)
    assert furthest(mine, by_hand(make(name), batches, "rowwise_adagrad")) < 1e-5


@pytest.mark.parametrize("technique", ["resident", "hotline"])
def test_a_loop_leaves_nothing_of_its_batches_in_memory(batches, technique, monkeypatch) -> None:
    """A cycle through autograd's graph would keep every batch's activations until the end."""
    kept: list[weakref.ref] = []
    made = GroupRows.__init__

    def remembered(self, *arguments: object) -> None:
        made(self, *arguments)
        kept.append(weakref.ref(self))

    monkeypatch.setattr(GroupRows, "__init__", remembered)
    own_loop(make("two_tower"), batches, "sgd", technique)
    gc.collect()
    assert len(kept) > len(batches)
    assert not [lookup for lookup in kept if lookup() is not None]


def test_the_recipe_can_leave_the_dense_part_plain(batches) -> None:
    model = make("two_tower")
    with recpipe.place(model, batches, "trainer.backend=plain"):
        assert not any(map(is_converted, model.modules()))


def test_micro_batches_that_lose_a_gradient_are_found(batches, monkeypatch) -> None:
    """The negative control: without the cold micro-batches' gradients the tables differ."""
    whole = GroupRows._gradient

    def lossy(self: GroupRows) -> torch.Tensor:
        self._given = self._given[:1]
        return whole(self)

    monkeypatch.setattr(GroupRows, "_gradient", lossy)
    mine = own_loop(make("two_tower"), batches, "rowwise_adagrad", "hotline")
    assert furthest(mine, by_hand(make("two_tower"), batches * 2, "rowwise_adagrad")) > 1e-3


class Module(L.LightningModule):
    """A LightningModule as people have them."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Events, index: int) -> torch.Tensor:
        loss, _ = self.net(batch)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS["rowwise_adagrad"][1](self.net.parameters())


@pytest.mark.parametrize("technique", ["lru", "hotline", "bagpipe"])
def test_under_lightning(batches, technique, tmp_path) -> None:
    model = make("two_tower")
    with recpipe.place(model, batches, *overrides("rowwise_adagrad", technique)) as placed:
        quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
        trainer = L.Trainer(
            max_epochs=1,
            accelerator=next(model.parameters()).device.type.replace("cuda", "gpu"),
            default_root_dir=tmp_path,
            **quiet,
        )
        trainer.fit(Module(model), placed.loader)
        mine = left_by(model)
    assert furthest(mine, by_hand(make("two_tower"), batches, "rowwise_adagrad")) < 1e-5


def test_what_is_given_back_loads_into_plain_torchrec(batches) -> None:
    model = make("din")
    with recpipe.place(model, batches, *overrides("sgd", "lru")) as placed:
        for batch in placed.loader:
            model(batch).sum().backward()
        state = model.state_dict()
        with torch.no_grad():
            logits = model(batches[0])
    plain = make("din")
    plain.load_state_dict(state, strict=True)
    with torch.no_grad():
        torch.testing.assert_close(plain(batches[0]), logits)


@pytest.mark.parametrize(
    ("example", "how"),
    [
        ("own_loop", "bagpipe"),
        # Lightning under hotline is what each test of hotline's training does.
        pytest.param("own_lightning", "hotline", marks=pytest.mark.soak),
    ],
)
def test_the_examples_train(example, how, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    main = runpy.run_path(str(ROOT / "examples" / f"{example}.py"))["main"]
    loss = main(how)
    assert loss == pytest.approx(main("resident"), abs=1e-3)
    assert loss < 0.5


def test_plugins_that_need_the_loop_are_refused(batches) -> None:
    with pytest.raises(PluginError, match=r"slipstream takes part in Lightning's loop"):
        recpipe.place(make("two_tower"), batches, "+plugin=slipstream")


@pytest.mark.parametrize("precision", ["tf32", "bfloat16"])
def test_a_precision_is_the_loops_own(batches, precision) -> None:
    with pytest.raises(UserError, match=rf"^model.precision={precision}: .*torch.autocast"):
        recpipe.place(make("two_tower"), batches, f"model.precision={precision}")


def test_a_module_without_collections_is_refused(batches) -> None:
    with pytest.raises(UserError, match="Linear holds no EmbeddingBagCollection"):
        recpipe.place(nn.Linear(2, 2), batches)
