"""A user's model whose rows are not pooled: packaged, quantized, evaluated and asked as a server asks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from recpipe_low_precision.checkpoint import write_quantized
from recpipe_low_precision.opened import open_quantized
from recpipe_serve.batching.forms import together
from recpipe_serve.batching.scorer import RequestScorer
from recpipe_serve.errors import Refused
from recpipe_serve.http.features import Features

import recpipe
from recpipe.answers import score
from recpipe.answers.parts import of_checkpoint
from recpipe.answers.row_types import decode_rows, encode_rows
from recpipe.answers.trained import open_trained, scored
from recpipe.plugin.batch import Batch
from recpipe.private_api.compiled import compiler
from tests.answers.attention import WORDS, histories

needs_compiler = pytest.mark.skipif(compiler() is None, reason="packages are compiled: no C++ compiler here")
KINDS = {"goods": "int8", "shops": "int4", "user": "fp16"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a short run."""
    folder = tmp_path_factory.mktemp("histories")
    words = (*WORDS, f"data.path={histories(folder)}")
    recpipe.train(None, None, *words, output=folder / "run", quiet=True).close()
    return folder / "run" / "checkpoints"


@pytest.fixture(scope="module")
def packed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its package."""
    return recpipe.package(checkpoint, tmp_path_factory.mktemp("packed") / "model.recpipe", quiet=True)


def inputs_of(batch: Batch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return batch.dense, batch.sparse.values().long(), batch.sparse.lengths().long()


@pytest.mark.soak  # tests/models export one with histories, and test_package.py compiles
@needs_compiler
def test_the_package_scores_as_the_model_does(packed: Path, checkpoint: Path) -> None:
    trained, scorer = open_trained(checkpoint), score.Scorer(packed)
    assert trained.model is trained.called.module
    for size in (1, 2, 64, 200):
        batch = next(trained.dataset.batches("eval", size))
        (found,) = scored(trained.called, [batch], labelled=False)
        torch.testing.assert_close(scorer(*inputs_of(batch)), found.scores, rtol=1e-5, atol=1e-6)
    dense, ids, lengths = (part.clone() for part in inputs_of(batch))
    sample = int(lengths[200:400].argmax())
    place = 200 + int(lengths[200 : 200 + sample].sum())
    ids[place] = (ids[place] + 1) % 200  # a first event of that sample's history
    apart = (scorer(dense, ids, lengths) != scorer(*inputs_of(batch))).nonzero().flatten()
    assert apart.tolist() == [sample]
    assert scorer(dense[:0], ids[:0], lengths[:0]).shape == (0,)
    offline = recpipe.predict(checkpoint, None, f"package={packed}", "scores=raw", quiet=True)
    batches = [b for split in ("train", "eval") for b in trained.dataset.batches(split, 128)]
    assert torch.from_numpy(offline).equal(torch.cat([scorer(*inputs_of(b)) for b in batches]))


@pytest.mark.soak  # by the same package
@needs_compiler
def test_a_history_for_all_candidates_gives_the_bits_of_one_for_each(packed: Path, checkpoint: Path) -> None:
    """Requests of 3, 1 and 5 candidates; the second user has seen nothing."""
    scorer = score.Scorer(packed)
    features, requests = Features(scorer.manifest, 100), RequestScorer(scorer)
    rng, seen = np.random.default_rng(1), (4, 0, 7)
    users = [
        {
            "history": rng.integers(0, 200, (1, n)),
            "shops": rng.integers(0, 40, (1, n)),
            "user": rng.integers(0, 300, 1),
        }
        for n in seen
    ]
    candidates = [
        {"dense": rng.random((n, 1)).astype(np.float32), "item": rng.integers(0, 200, n)} for n in (3, 1, 5)
    ]
    asked = [features.asked({**user, **items}) for user, items in zip(users, candidates, strict=True)]
    found = requests(*together(asked))
    alone = [
        {name: np.repeat(values, len(items["item"]), axis=0) for name, values in user.items()} | items
        for user, items in zip(users, candidates, strict=True)
    ]
    dense, sides = together([features.asked(one) for one in alone])
    assert len(sides) == 1
    assert requests(dense, sides).equal(found)
    users[2]["history"] = users[2]["history"][:, ::-1].copy() + 1
    users[2]["history"] %= 200
    others = [features.asked({**user, **items}) for user, items in zip(users, candidates, strict=True)]
    assert (requests(*together(others)) == found).tolist() == [True] * 4 + [False] * 5
    wrong = {**users[0], **candidates[0], "item": rng.integers(0, 200, (3, 2))}
    with pytest.raises(Refused, match="'item' has not one id for each sample, as the model needs"):
        features.asked(wrong)
    ids = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match="'item' has not one id for each sample"):
        scorer(torch.zeros(1, 1), ids, torch.tensor([2, 0, 0, 0]))


def decoded(checkpoint: Path) -> torch.nn.Module:
    """The float model with the weights that rows of ``KINDS`` stand for."""
    model = open_trained(checkpoint).model
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            table = name.split(".")[-2]
            if table in KINDS:
                kind = KINDS[table]
                parameter.copy_(decode_rows(encode_rows(parameter, kind), kind, parameter.shape[1]))
    return model.eval()


def test_rows_in_low_precision_give_the_decoded_rows_scores(checkpoint: Path, tmp_path: Path) -> None:
    trained = open_trained(checkpoint)
    write_quantized(tmp_path / "q", trained.source(), KINDS)
    batch = next(trained.dataset.batches("eval", 200))
    with torch.no_grad():
        found = open_quantized(tmp_path / "q")(batch)
        torch.testing.assert_close(found, decoded(checkpoint)(batch), rtol=1e-5, atol=1e-5)
        assert float((found - trained.model(batch)).abs().max()) > 1e-4
    pruned = {"shops": np.arange(40) % 2 > 0}
    write_quantized(tmp_path / "p", trained.source(), KINDS, pruned)
    with torch.no_grad():
        apart = (open_quantized(tmp_path / "p")(batch) != found).flatten()
    events = [
        bag.tolist()
        for bag in torch.split(batch.sparse["shops"].values(), batch.sparse["shops"].lengths().tolist())
    ]
    assert apart.tolist() == [any(shop % 2 == 0 for shop in bag[:6]) for bag in events]


@pytest.mark.soak  # by the same package
def test_the_plugin_quantizes_it_and_its_package_keeps_the_types(checkpoint: Path, tmp_path: Path) -> None:
    """All but the compilation, which is the same for every checkpoint."""
    pytest.importorskip("recpipe_low_precision", reason="the plugin is not installed")
    small = recpipe.quantize(
        checkpoint,
        None,
        "+plugin=low_precision",
        "plugins.low_precision.bound=0.01",
        output=tmp_path,
        quiet=True,
    )
    assert {table["type"] for table in small["tables"].values()} - {"fp32"}
    whole = recpipe.evaluate(checkpoint, None, "split=eval", quiet=True)
    found = recpipe.evaluate(tmp_path / "quantized", None, "split=eval", quiet=True)
    assert 0 < abs(found["loss"] - whole["loss"]) < 0.02
    parts = of_checkpoint(tmp_path / "quantized", None)
    (tmp_path / "tables").mkdir()
    parts.write_tables(tmp_path)
    tables = score.Tables(tmp_path, parts.content["tables"])
    offsets = score.offsets_of(parts.golden["lengths"])
    names = [feature["name"] for feature in parts.content["sparse"]]
    lookups = [score.Lookup(lookup, names, tables) for lookup in parts.content["lookups"]]
    calls = [score.Call(lookup, parts.golden["ids"], offsets, 64) for lookup in lookups]
    given = score.with_lengths(calls, [call.lookup(*call[1:]) for call in calls])
    with torch.no_grad():
        made = parts.programs[0].exported.module()(parts.golden["dense"], given)
    assert made.equal(parts.programs[0].scores)
