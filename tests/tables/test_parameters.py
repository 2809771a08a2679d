"""What a user has set on a collection's parameters is taken over, or refused with the parameter's name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recpipe.errors import UserError
from recpipe.plugin.tables import TableOptimizer
from recpipe.tables.groups import ModelTables, collections_of, group_tables
from recpipe.tables.proxy import proxy_of
from recpipe.training.optim import OptimConfig

ADAGRAD = TableOptimizer("adagrad", 0.1)
OF_T = "bags.embedding_bags.t.weight"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        pooled, rows = (
            [kind(name=n, embedding_dim=4, num_embeddings=20, feature_names=[n]) for n in names]
            for kind, names in ((EmbeddingBagConfig, ("t", "u")), (EmbeddingConfig, ("v",)))
        )
        self.bags, self.sequences = EmbeddingBagCollection(pooled), EmbeddingCollection(rows)
        self.again = self.bags  # the same collection in two places is one
        self.out = nn.Linear(4, 20)

    @property
    def table(self) -> nn.Module:
        return self.bags.embedding_bags["t"]


def placed(change: Callable[[Net], object]) -> ModelTables:
    net = Net()
    change(net)
    return group_tables(collections_of(net), OptimConfig(ADAGRAD, {}).of_table, 1)


def optimizers(tables: ModelTables) -> dict[str, TableOptimizer]:
    return {t.name: g.tables.optimizer for g in tables.groups for t in g.tables.tables}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda net: net.table.weight.register_hook(lambda g: g), f"a hook is registered on {OF_T}"),
        (
            lambda net: net.sequences.embeddings["v"].weight.register_post_accumulate_grad_hook(print),
            r"a hook is registered on sequences\.embeddings\.v\.weight",
        ),
        (
            lambda net: net.table.register_forward_hook(lambda *_: None),
            r"a hook is registered on bags\.embedding_bags\.t,",
        ),
        (lambda net: weight_norm(net.table), f"{OF_T} is made of parametrizations.weight.original0"),
        (lambda net: nn.utils.weight_norm(net.table), f"{OF_T} is made of weight_g, weight_v"),
        (lambda net: setattr(net.bags.embedding_bags, "t", nn.Identity()), f"{OF_T} is made of nothing"),
        (
            lambda net: setattr(net.bags.embedding_bags["u"], "weight", net.table.weight),
            r"bags\.t\.weight and bags\.embedding_bags\.u\.weight are the same weights.*feature_names",
        ),
        (
            lambda net: setattr(net.sequences.embeddings["v"], "weight", net.table.weight),
            r"bags\.embedding_bags\.t\.weight and sequences\.embeddings\.v\.weight are the same weights",
        ),
        (lambda net: setattr(net.out, "weight", net.table.weight), f"{OF_T} and out.weight are the same"),
        (lambda net: net.bags.half(), "table 't' of 'bags' is stored as torch.float16"),
        (lambda net: net.double(), "table 't' of 'bags' is stored as torch.float64"),
        (lambda net: setattr(net.table, "padding_idx", 0), r"embedding_bags\.t\.padding_idx is 0"),
        (lambda net: setattr(net.table, "max_norm", 1.0), r"embedding_bags\.t\.max_norm is 1\.0"),
        (
            lambda net: setattr(net.table, "weight", nn.Parameter(torch.zeros(30, 4))),
            r"t\.weight is \[30, 4\], and its config says \[20, 4\]",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_what_would_be_lost_is_refused(change, words) -> None:
    with pytest.raises(UserError, match=words) as told:
        placed(change)
    assert "\n" not in str(told.value)


def test_what_no_gradient_is_required_of_is_frozen() -> None:
    found = optimizers(placed(lambda net: net.table.weight.requires_grad_(False)))
    assert {name for name, optimizer in found.items() if optimizer.frozen} == {"t"}
    assert found["u"] == found["v"] == ADAGRAD


def test_frozen_tables_have_records_of_weights_alone() -> None:
    tables = placed(lambda net: net.bags.requires_grad_(False))
    assert tables.shapes() == {"t": (20, 4, 0), "u": (20, 4, 0), "v": (20, 4, 4)}
    assert tables.bytes_of_tables() == {"t": 320, "u": 320, "v": 640}
    assert len(tables.groups) == 2
    assert {name: info.state for name, info in tables.infos().items()} == {"t": 0, "u": 0, "v": 4}


def test_frozen_weights_may_be_shared() -> None:
    """Their rows stay equal."""

    def shared(net: Net) -> None:
        net.bags.embedding_bags["u"].weight = net.table.weight.requires_grad_(False)

    found = optimizers(placed(shared))
    assert found["t"].frozen
    assert found["u"].frozen


def test_an_attached_rate_of_0_freezes_and_a_recipe_unfreezes_no_parameter() -> None:
    net = Net()
    net.table.weight.requires_grad_(False)
    config = OptimConfig(ADAGRAD, {}, {"*": TableOptimizer("sgd", 0.5)})
    found = optimizers(group_tables(collections_of(net), config.of_table, 1))
    assert found["t"].frozen
    assert found["u"] == TableOptimizer("sgd", 0.5)

    def attach(net: Net) -> None:
        weights = net.bags.embedding_bags["u"].weight
        weights._optimizer_classes, weights._optimizer_kwargs = [torch.optim.Adagrad], [{"lr": 0.0}]

    assert optimizers(placed(attach))["u"].frozen


def test_weights_that_a_model_reads_are_named() -> None:
    """As for a penalty on them: they are no parameters any more."""
    proxy = proxy_of("bags", Net().bags)
    assert not hasattr(proxy, "embedding_bags")
    with pytest.raises(UserError, match="'bags.embedding_bags' is read.*use what the collection returns"):
        _ = proxy.embedding_bags["t"].weight
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = proxy.other
