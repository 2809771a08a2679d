"""Whether a model may be trained in parts of a batch: found out, told, and held to."""

from __future__ import annotations

import copy
import re
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recpipe.backend import build
from recpipe.backend.build import build_backend
from recpipe.config.compose import compose
from recpipe.data.select import between
from recpipe.distributed.ranks import Ranks
from recpipe.pipeline.batch import InFlight
from recpipe.pipeline.parts import SAMPLES, find_out
from recpipe.pipeline.placed import Parts, PlacedModel
from recpipe.pipeline.step import Cores, StepTimes, accumulate
from recpipe.plugin.errors import PluginError
from recpipe.plugin.splitter import Split
from recpipe.run import run
from recpipe.tables.resident import ResidentCollection
from tests.model import in_parts
from tests.pipeline.samples import assembly_of, collection_of, model_over, placed, random_batch
from tests.tables.samples import CPU, DIM, FEATURES, dump

REFUSED = {
    "InBatch": "neither a mean nor a sum over samples .*in-batch negatives",
    "Normed": "keeps statistics of its batches",
    "Dropped": r"draws random numbers \(dropout\)",
}
BATCH = random_batch(np.random.default_rng(3), 100, True)


def bags() -> EmbeddingBagCollection:
    torch.manual_seed(4)
    return EmbeddingBagCollection(
        [
            EmbeddingBagConfig(name=f.name, embedding_dim=DIM, num_embeddings=f.rows, feature_names=[f.name])
            for f in FEATURES
        ]
    )


def model_of(kind: str, **more: object) -> PlacedModel:
    return placed(getattr(in_parts, kind)(bags()), BATCH, **more)


# -- found out -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("Mean", Parts()),
        ("Output", Parts()),
        ("Sum", Parts(sums=True)),
        ("Shifted", Parts(own_ids=False)),
    ],
)
@pytest.mark.parametrize("size", [2, 7, 100])
def test_means_and_sums_are_known(kind, found, size) -> None:
    assert find_out(model_of(kind), between(BATCH, 0, size)) == found


@pytest.mark.parametrize("kind", REFUSED)
def test_others_are_refused_with_the_reason(kind) -> None:
    parts = find_out(model_of(kind), BATCH)
    assert parts.refused is not None
    assert not parts.sums
    assert re.search(REFUSED[kind], parts.refused)


@pytest.mark.parametrize(
    "kept", [0, [], torch.zeros(0), SimpleNamespace(batches=0)], ids=lambda kept: type(kept).__name__
)
def test_a_model_that_counts_in_an_attribute_is_refused_and_not_changed(kept: object) -> None:
    before = copy.deepcopy(kept)
    model = placed(in_parts.Counting(bags(), kept), BATCH)
    assert (
        find_out(model, BATCH).refused
        == "the model goes on counting in its attribute 'kept' from batch to batch"
    )
    assert str(model.module.kept) == str(before)


def test_the_last_batch_may_be_remembered() -> None:
    """Also one that a step before has left, with its graph."""
    model = model_of("Remembering")
    model.called(BATCH)
    left = model.module.last
    assert find_out(model, BATCH) == Parts()
    assert model.module.last is left


def test_a_model_that_cannot_be_copied_is_trained_in_whole_batches() -> None:
    model = model_of("Mean")
    model.module.lock = threading.Lock()
    assert "Mean cannot be copied" in str(find_out(model, BATCH).refused)


def test_a_single_sample_tells_nothing() -> None:
    assert "a single sample" in str(find_out(model_of("Mean"), between(BATCH, 0, 1)).refused)


def test_a_loss_that_is_no_number_is_left_to_the_step() -> None:
    batch = between(BATCH, 0, 40)
    batch.labels = batch.labels.clone()
    batch.labels[3] = float("nan")
    assert find_out(model_of("Mean"), batch) == Parts()


def test_modes_are_kept_and_count() -> None:
    """A BatchNorm that the user has frozen takes the batch's statistics into no account."""
    model = model_of("Normed")
    model.module.norm.eval()
    assert find_out(model, BATCH) == Parts()
    assert model.module.training
    assert not model.module.norm.training


@pytest.mark.parametrize("kind", ["Mean", "Shifted", *REFUSED])
def test_nothing_is_changed_by_it(kind) -> None:
    model = model_of(kind)
    (collection,) = model.embeddings.collections
    kept = [p.detach().clone() for p in [*model.module.parameters(), *model.module.buffers()]]
    tables, random = dump(collection), torch.get_rng_state()
    find_out(model, BATCH)
    now = [*model.module.parameters(), *model.module.buffers()]
    assert all(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
    assert all(p.grad is None for p in model.module.parameters())
    assert all(np.array_equal(tables[name], rows) for name, rows in dump(collection).items())
    assert torch.equal(random, torch.get_rng_state())
    assert (model.training, model.late_calls) == (True, 0)


def test_it_is_found_by_some_samples_of_a_large_batch(monkeypatch) -> None:
    seen = []
    model = model_of("Mean")
    with model.module.register_forward_hook(lambda *call: seen.append(call[1][0].size)):
        find_out(model, random_batch(np.random.default_rng(0), 4 * SAMPLES, True))
    assert seen == [SAMPLES, SAMPLES // 2, SAMPLES // 2, SAMPLES], "the last is the same batch once more"


def gradients(model: PlacedModel, parts: Parts, bounds: tuple[int, ...]) -> list[torch.Tensor]:
    model.parts = parts
    loss = accumulate(model, InFlight(BATCH, bounds=bounds), StepTimes())
    (collection,) = model.embeddings.collections
    return [
        loss,
        *(p.grad for p in model.module.parameters()),
        *map(torch.from_numpy, dump(collection).values()),
    ]


@pytest.mark.parametrize("kind", ["Mean", "Sum"])
def test_parts_make_the_whole_as_found_out(kind) -> None:
    model = model_of(kind)
    found = find_out(model, BATCH)
    whole = gradients(model, found, ())
    for one, other in zip(whole, gradients(model_of(kind), found, (30, 100)), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-6)
    wrong = gradients(model_of(kind), Parts(sums=not found.sums), (30, 100))
    assert not torch.allclose(wrong[1], whole[1], rtol=1e-2)


# -- held to ---------------------------------------------------------------------------------------


def halves(batch, needs_cold) -> Split:
    return Split(np.arange(batch.size), (batch.size // 2, batch.size))


@pytest.fixture(params=[2, 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _measures_nothing(monkeypatch) -> None:
    monkeypatch.setattr(build, "calibrated", lambda *_: {})
    monkeypatch.setattr(build, "measured_sharing", lambda *_: {"model": {}})


class TwoTrainers:
    """The channel of the first of them, whose words the other one takes."""

    size, index = 2, 0

    def gather(self, part):
        return [part, part[:0]]


def shared(
    model: PlacedModel, trainers=None, device: torch.device = CPU, kind="auto", **parts
) -> Cores | None:
    everyone = trainers or Ranks().channel()
    backend = build_backend(
        kind, model, assembly_of(**parts).splitter, BATCH, BATCH.size, device, everyone, Path()
    )
    if backend.beside is not None:
        backend.beside.close()
    return backend.cores


def test_as_many_cores_as_threads_share(threads, tmp_path) -> None:
    cores = shared(model_of("Mean"))
    assert cores is not None
    assert cores.count == threads
    cores.close()
    dlrm = model_over(collection_of("lru", "sgd", tmp_path))
    cores = shared(dlrm, splitter=halves)
    assert cores is not None
    cores.close()


def test_one_thread_has_nobody_to_share_with() -> None:
    assert torch.get_num_threads() == 1
    assert shared(model_of("Mean")) is None


@pytest.mark.parametrize(
    "why", ["plain", "sharded", "ranks", "device", "tables' threads", "other ids", "no place"]
)
def test_some_runs_are_not_shared_out(threads, monkeypatch, why) -> None:
    how = {
        "plain": {"kind": "plain"},
        "ranks": {"trainers": TwoTrainers()},
        "device": {"device": torch.device("cuda")},
    }
    if why == "tables' threads":
        model = model_of("Mean", collection_over=lambda tables: ResidentCollection(tables, CPU, 2))
    else:
        model = model_of("Shifted" if why == "other ids" else "Mean")
    if why == "no place":
        model.inputs.places = ((),)
    if why == "sharded":
        monkeypatch.setattr(ResidentCollection, "sends", True)
    assert shared(model, **how.get(why, {})) is None
    model.embeddings.close()


@pytest.mark.parametrize("kind", REFUSED)
def test_a_splitter_is_refused_with_the_reason_and_cores_stay_away(threads, kind) -> None:
    with pytest.raises(PluginError, match=f"acme.*{REFUSED[kind]}.*caching policies work"):
        shared(model_of(kind), splitter=halves)
    assert shared(model_of(kind)) is None


def test_ranks_are_warned(caplog) -> None:
    assert shared(model_of("InBatch"), TwoTrainers()) is None
    assert "each rank trains its share as a batch of its own: its loss is neither" in caplog.text


def test_a_model_is_only_tried_where_it_matters(monkeypatch) -> None:
    monkeypatch.setattr(build, "find_out", None)
    assert shared(model_of("InBatch")) is None


# -- in a run --------------------------------------------------------------------------------------

SMALL = (
    "data.samples=2000",
    "data.batch_size=64",
    "data.tables={a: 300, b: 80}",
    "model.embedding_dim=8",
    "optim.tables.name=sgd",
    "optim.dense={name: SGD, lr: 0.1}",
    "tiers.resident_bytes=30%",
    "trainer.progress=false",
    "trainer.logger=null",
    "trainer.checkpoint_every=null",
)


def quality(kind: str, folder: Path, *overrides: str) -> dict[str, float]:
    target = f"model._target_=tests.model.in_parts.{kind}"
    found = run(compose([*SMALL, "model=custom", target, *overrides]), folder)["quality"]
    return {name: value for name, value in found.items() if value is not None}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_run_refuses_hotline_and_caches_go_on(tmp_path, kind) -> None:
    with pytest.raises(PluginError, match=f"hotline.*{REFUSED[kind]}"):
        quality(kind, tmp_path / "hotline", "+plugin=hotline")
    resident = quality(kind, tmp_path / "resident", "tiers.policy=resident")
    cached = quality(kind, tmp_path / "lru", "tiers.policy=lru", "tiers=ssd")
    assert cached == pytest.approx(resident, rel=1e-4)


@pytest.mark.parametrize("kind", ["Mean", "Sum"])
def test_a_run_splits_means_and_sums(tmp_path, kind) -> None:
    lr = "optim.tables.lr=0.001" if kind == "Sum" else "optim.tables.lr=0.1"
    rates = (lr, "optim.dense.lr=0.001") if kind == "Sum" else (lr,)
    resident = quality(kind, tmp_path / "resident", "tiers.policy=resident", *rates)
    popular = quality(kind, tmp_path / "hotline", "+plugin=hotline", *rates)
    assert popular == pytest.approx(resident, rel=1e-4)


def test_all_trainers_take_the_first_ones_choices(monkeypatch) -> None:
    """Ranks that measured for themselves rounded differently, and one of them kept its answers last."""

    class Second(TwoTrainers):
        index = 1

        def gather(self, part):
            assert part.tobytes() == b"{}", "the second one measures nothing"
            return [np.frombuffer(b'{"chain 3-1": {"1": {"16": "cpu"}}}', np.uint8), part]

    monkeypatch.setattr(build, "calibrated", lambda *_: pytest.fail("measured"))
    made = build_backend("auto", model_of("Mean"), None, BATCH, BATCH.size, CPU, Second(), Path())
    assert made.choices == {"chain 3-1": {"1": {"16": "cpu"}}}
