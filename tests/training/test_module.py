"""The LightningModule: losses that are no number, random state, and dense parameters in checkpoints."""

from __future__ import annotations

import inspect
import random

import lightning as L
import numpy as np
import pytest
import torch

from recpipe.errors import UserError
from recpipe.model.metrics import judged
from recpipe.training.generators import random_state, set_random_state
from recpipe.training.module import LossTotal, RankingModule
from tests.pipeline.samples import (
    SIZE,
    Listed,
    collection_of,
    eval_loader_of,
    loader_of,
    model_over,
)
from tests.tables.samples import dump, identical


def module_of(dataset, embeddings, lr=0.1, name="dlrm") -> RankingModule:
    def optimizer(parameters):
        return torch.optim.SGD(parameters, lr=lr)

    return RankingModule(model_over(embeddings, name), optimizer, loader_of(dataset, embeddings))


def fit(module: RankingModule, dataset=None) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        inference_mode=False,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, module.loader, eval_loader_of(dataset) if dataset else None)
    return trainer


def test_the_step_s_signature_is_not_read_from_its_code_each_time(monkeypatch) -> None:
    step = RankingModule.training_step
    kept = inspect.signature(step)
    assert inspect.getfullargspec(step).args == ["self", "batch", "batch_idx"]
    assert inspect.signature(step) is kept
    monkeypatch.delattr(step, "__signature__")
    assert inspect.signature(step) == kept


def spoil_dense(dataset, module) -> None:
    dataset.lists["train"][4].dense[2, 1] = float("inf")


def spoil_labels(dataset, module) -> None:
    dataset.lists["train"][4].labels[2] = float("nan")


def spoil_parameter(dataset, module) -> None:
    name = next(n for n in module.model.dense_parameters() if n.startswith("over_arch"))

    def fill(batch, index) -> None:
        if index == 4:
            module.model.dense_parameters()[name].data.fill_(float("nan"))

    module.on_train_batch_start = fill


def spoil_tables(dataset, module) -> None:
    def fill(batch, index) -> None:
        if index == 4:
            storage = module.model.embeddings
            for region in storage.regions():
                weights, state = storage.read(region)
                storage.write(region, (np.full_like(weights, np.nan), state))

    module.on_train_batch_start = fill


@pytest.mark.parametrize(
    ("policy", "spoil", "words"),
    [
        ("resident", spoil_dense, "the batch's dense"),
        ("hot", spoil_dense, "the batch's dense"),
        ("resident", spoil_labels, "the batch's labels"),
        ("hot", spoil_parameter, "parameter over_arch"),
        ("resident", spoil_tables, "the rows of its ids"),
    ],
)
def test_a_loss_that_is_no_number_stops_and_names_the_tensor(tmp_path, policy, spoil, words) -> None:
    dataset = Listed()
    module = module_of(dataset, collection_of(policy, "adagrad", tmp_path))
    spoil(dataset, module)
    with pytest.raises(UserError, match=f"loss is not finite at step 5; first bad tensor: {words}.*Lower"):
        fit(module)


@pytest.mark.parametrize("policy", ["resident", "lru"])
def test_a_bad_step_leaves_tables_and_dense_part_as_they_were(tmp_path, policy) -> None:
    parameters = []
    for count, spoiled in ((4, False), (10, True)):
        dataset = Listed(count=10)
        del dataset.lists["train"][count:]
        module = module_of(dataset, collection_of(policy, "adagrad", tmp_path))
        if spoiled:
            spoil_dense(dataset, module)
            with pytest.raises(UserError):
                fit(module)
        else:
            fit(module)
        parameters.append((dump(module.model.embeddings), module.state_dict()))
    (tables, dense), (others, other_dense) = parameters
    assert identical(tables, others)
    assert all(torch.equal(dense[name], value) for name, value in other_dense.items())


def test_a_diverging_run_stops(tmp_path) -> None:
    with pytest.raises(UserError, match="not finite"):
        fit(module_of(Listed(), collection_of("resident", "sgd", tmp_path), lr=1e30))


def test_on_a_gpu_losses_are_looked_at_before_anything_is_made_of_the_model(tmp_path) -> None:
    """In between, nothing waits for the GPU."""

    def spoiled(folder: str) -> RankingModule:
        dataset = Listed()
        module = module_of(dataset, collection_of("lru", "sgd", tmp_path / folder))
        module.looks_each_step = False
        spoil_dense(dataset, module)
        return module

    with pytest.raises(UserError, match="at step 10, or in the 50 before; first bad tensor: parameter"):
        fit(spoiled("end"))
    module, seen = spoiled("checkpoint"), []

    def save(*_: object) -> None:
        if module.global_step > 5:
            seen.append(module.global_step)
            module.on_save_checkpoint({})

    module.on_train_batch_end = save
    with pytest.raises(UserError, match="at step 6, or in the 50 before"):
        fit(module)
    assert seen == [6], "a bad model is not saved"


def test_loss_so_fares_are_differences_of_totals(tmp_path) -> None:
    module = module_of(Listed(), collection_of("resident", "sgd", tmp_path), lr=1e-9)
    assert np.isnan(module.totals.loss_so_far().mean_since(LossTotal()))
    fit(module)
    total = module.totals.loss_so_far()
    assert total.steps == len(module.loader)
    assert 0.3 < total.mean_since(LossTotal()) < 1.5
    assert np.isnan(module.totals.loss_so_far().mean_since(total))


def test_an_evaluation_ends_with_the_figures_of_all_its_samples(tmp_path) -> None:
    dataset = Listed()
    module = module_of(dataset, collection_of("resident", "sgd", tmp_path), lr=1e-9)
    fit(module, dataset)
    batches = list(eval_loader_of(dataset))
    with torch.no_grad():
        logits = torch.cat([module.model(batch) for batch in batches])
    assert len(logits) == SIZE + 5
    found = module.evaluation.result()
    expected = judged("clicks", torch.cat([batch.labels for batch in batches]), logits)
    assert {**found, "loss": 0} == {**expected, "loss": 0}
    assert expected["auc"] > 0


def test_random_state_restores_every_generator() -> None:
    def draw() -> tuple[float, ...]:
        return float(torch.rand(())), random.random(), float(np.random.rand()), random.gauss(0, 1)

    draw()
    state = random_state()
    first = draw()
    assert draw() != first
    set_random_state(state)
    assert draw() == first


def test_state_dict_is_the_dense_part_and_fits_only_its_model(tmp_path) -> None:
    dataset = Listed()
    module = module_of(dataset, collection_of("resident", "sgd", tmp_path))
    state = {name: value.clone() + 1 for name, value in module.state_dict().items()}
    assert not any("sparse_arch" in name for name in state)
    module.load_state_dict(state)
    assert all(torch.equal(value, state[name]) for name, value in module.state_dict().items())
    other = module_of(dataset, collection_of("resident", "sgd", tmp_path), name="dlrm_dcn")
    with pytest.raises(UserError, match="another model"):
        other.load_state_dict(state)
    name, value = next(iter(state.items()))
    with pytest.raises(UserError, match=f"{name} is .* there and .* here"):
        module.load_state_dict(state | {name: torch.zeros(3, *value.shape)})


def test_a_rank_goes_on_with_the_state_of_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 saves for all. What it would save of another rank's GPU is a state that rank has long left."""
    states = {0: torch.tensor([7], dtype=torch.uint8), 1: torch.tensor([0], dtype=torch.uint8)}
    current = 0
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: states[current])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: states.update({current: state}))
    saved = random_state()
    current = 1
    set_random_state(saved)
    assert states[1] == 7
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert random_state()["cuda"] == [], "a run on the CPU of a machine that has a GPU"
    set_random_state(saved)
