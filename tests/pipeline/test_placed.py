"""recpipe's own model over any collection of tables, and its recipe's errors."""

from __future__ import annotations

import pytest
import torch

from recpipe.common.validation import typed
from recpipe.data.select import between
from recpipe.errors import UserError
from recpipe.model.config import ModelConfig
from recpipe.model.dlrm import DlrmSizes, make_dlrm
from tests.pipeline.samples import SCHEMA, Listed, collection_of, model_config, model_over
from tests.tables.samples import CPU

POLICIES = ["resident", "lru"]


@pytest.mark.parametrize("name", ["dlrm", "dlrm_dcn"])
@pytest.mark.parametrize("policy", POLICIES)
def test_parts_of_a_batch_score_as_the_whole(tmp_path, name, policy) -> None:
    model = model_over(collection_of(policy, "sgd", tmp_path), name).eval()
    batch = Listed(count=1, last=9).lists["train"][0]
    with torch.no_grad():
        logits = model(batch)
        parts = [model(between(batch, low, high)) for low, high in ((0, 4), (4, 9))]
    torch.testing.assert_close(torch.cat(parts), logits)
    assert logits.shape == (9,)


@pytest.mark.parametrize("name", ["dlrm", "dlrm_dcn"])
@pytest.mark.parametrize("policy", POLICIES)
def test_its_state_is_that_of_torchrecs_own_class(tmp_path, name, policy) -> None:
    """Every name and shape, and then the same logits."""
    model = model_over(collection_of(policy, "sgd", tmp_path), name).eval()
    plain = make_dlrm(DlrmSizes.of(model_config(name), SCHEMA), CPU, tables=CPU)
    batch = Listed(count=1, last=9).lists["train"][0]
    state = model.module.state_dict()
    with torch.no_grad():
        plain.load_state_dict(state, strict=True)
        torch.testing.assert_close(plain(batch.dense, batch.sparse).squeeze(1), model(batch))
        table = next(key for key in state if key.endswith(".b.weight"))
        plain.load_state_dict({**state, table: state[table] + 1})
        assert not torch.allclose(plain(batch.dense, batch.sparse).squeeze(1), model(batch))


def test_tables_are_no_dense_parameters(tmp_path) -> None:
    names = {}
    for policy in POLICIES:
        model = model_over(collection_of(policy, "sgd", tmp_path))
        names[policy] = {n: tuple(p.shape) for n, p in model.dense_parameters().items()}
        trained = sum(p.numel() for p in model.dense_parameters().values())
        assert trained < 5000 < 700 * 8
    assert names["resident"] == names["lru"]


def test_first_weights_do_not_depend_on_where_tables_live(tmp_path) -> None:
    one, other = (
        model_over(collection_of(p, "sgd", tmp_path)).dense_parameters() for p in ("resident", "hot")
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
