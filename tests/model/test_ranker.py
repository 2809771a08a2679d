"""The model over any collection of tables, and its recipe's errors."""

from __future__ import annotations

import pytest
import torch

from recpipe.errors import UserError
from recpipe.model.ranker import ModelConfig
from recpipe.validation import typed
from tests.pipeline.samples import Listed, collection_of, ranker_over


@pytest.mark.parametrize("name", ["dlrm", "dlrm_dcn"])
@pytest.mark.parametrize("policy", ["resident", "lru"])
def test_dense_part_can_be_run_apart(tmp_path, name, policy) -> None:
    embeddings = collection_of(policy, "sgd", tmp_path)
    ranker = ranker_over(embeddings, name).eval()
    batch = Listed(count=1, last=9).lists["train"][0]
    with torch.no_grad():
        logits = ranker(batch)
        pooled = embeddings.eval()(batch.sparse).values()
        torch.testing.assert_close(ranker.score(batch.dense, pooled), logits)
        parts = [ranker.score(batch.dense[a:b], pooled[a:b]) for a, b in ((0, 4), (4, 9))]
    torch.testing.assert_close(torch.cat(parts), logits)
    assert logits.shape == (9,)


def test_tables_are_no_dense_parameters(tmp_path) -> None:
    names = {}
    for policy in ("resident", "lru"):
        ranker = ranker_over(collection_of(policy, "sgd", tmp_path))
        names[policy] = {n: tuple(p.shape) for n, p in ranker.dense_parameters().items()}
        trained = sum(p.numel() for p in ranker.dense_parameters().values())
        assert trained < 5000 < 700 * 8
    assert names["resident"] == names["lru"]


def test_first_weights_do_not_depend_on_where_tables_live(tmp_path) -> None:
    one, other = (
        ranker_over(collection_of(p, "sgd", tmp_path)).dense_parameters() for p in ("resident", "hot")
    )
    assert all(torch.equal(value, other[name]) for name, value in one.items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": "wide"}, "model.name=wide is unknown"),
        ({"embedding_dim": 6}, "embedding_dim=6: must be a multiple of 4"),
        ({"embedding_dim": 0}, "embedding_dim=0"),
        ({"bottom": []}, r"model.bottom=\[\]: must have at least 1 item"),
        ({"top": [8, 0]}, r"model.top\[1\]=0: must be greater than or equal to 1"),
    ],
)
def test_bad_recipes_are_refused(change, words) -> None:
    with pytest.raises(UserError, match=words):
        typed(ModelConfig, {"name": "dlrm", "embedding_dim": 8, "bottom": [8], "top": [8], **change}, "model")
