"""From ``model._target_`` to a module: what is typed, found and given, and one line for what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.data.dataset import Dataset
from recpipe.data.make import open_dataset
from recpipe.data.schema import Schema
from recpipe.errors import DataError, UserError
from recpipe.model.call import Called
from recpipe.model.config import ModelConfig, UserModel
from recpipe.model.make import make_called, make_model
from recpipe.plugin.errors import PluginLoadError
from recpipe.plugin.first_values import Drawn, Normal, Uniform
from recpipe.plugin.tables import SparseFeature, TableOptimizer
from recpipe.tables.groups import collections_of, group_tables
from tests.model.models import HERE

CPU = torch.device("cpu")
SCHEMA = Schema(("price",), (SparseFeature("user", 50), SparseFeature("item.id", 30)))
DEEP_FM = (
    "model._target_=torchrec.models.deepfm.SimpleDeepFMNN",
    "model.embedding_dim=16",
    "model.hidden_layer_size=20",
    "model.deep_fm_dimension=5",
    "model.loss=binary_cross_entropy_of_probabilities",
)
DCN = (
    "model._target_=torchrec.models.dlrm.DLRM_DCN",
    "model.embedding_dim=16",
    "model.dense_arch_layer_sizes=[64,16]",
    "model.over_arch_layer_sizes=[16,1]",
    "model.dcn_num_layers=2",
    "model.dcn_low_rank_dim=4",
)
TOWER = f"model._target_={HERE}.Tower"


def typed(*words: str) -> UserModel:
    found = Recipe.of(compose(words)).model
    assert isinstance(found, UserModel)
    return found


def made(*words: str, schema: Schema = SCHEMA) -> nn.Module:
    return make_model(typed(*words), schema, CPU)


def with_rows(model: nn.Module) -> nn.Module:
    """``model`` with its tables off the meta device."""
    for module in model.modules():
        if isinstance(module, EmbeddingBagCollection):
            for weight in module.to_empty(device=CPU).parameters():
                nn.init.uniform_(weight, -0.1, 0.1)
    return model


@pytest.fixture(scope="module")
def data() -> Dataset:
    return open_dataset({"name": "synthetic", "samples": 500, "table_scale": 0.01, "pooling": 3}, seed=1)


# -- the section -----------------------------------------------------------------------------


def test_arguments_are_what_recpipe_does_not_read_itself() -> None:
    model = typed(TOWER, "model.hidden=64", "model.loss=huber", "model.labels=labels.click")
    assert (model.target, model.arguments) == (f"{HERE}.Tower", {"hidden": 64})
    assert (model.loss, model.labels, model.embedding_dim) == ("huber", "labels.click", None)


def test_a_yaml_of_the_users_own_names_the_class(tmp_path: Path) -> None:
    """``--config-dir``, in Python ``hydra.searchpath``; keys that the yaml lacks need no plus sign either."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "my_tower.yaml").write_text(f"_target_: {HERE}.Tower\nhidden: 8\n")
    model = typed(f"hydra.searchpath=['{tmp_path}']", "model=my_tower", "model.activation=relu")
    assert (model.target, model.arguments) == (f"{HERE}.Tower", {"hidden": 8, "activation": "relu"})


def test_recpipes_own_models_are_what_they_were() -> None:
    model = Recipe.of(compose(["model=dlrm_dcn", "model.cross_rank=8"])).model
    assert isinstance(model, ModelConfig)
    assert (model.name, model.cross_rank) == ("dlrm_dcn", 8)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["model.botom=[3]"], "no 'model.botom' in the recipe. Did you mean 'model.bottom'?"),
        (
            ["model=dlrm", TOWER],
            "model=dlrm and model._target_=.* each choose a model: leave one of them out",
        ),
        (["model._target_=Tower"], "model._target_=Tower is no path to a class: write package.module.Class"),
        (["model._target_=3"], "model._target_=3: must be str, not int"),
        ([TOWER, "model.embedding_dim=3"], "model.embedding_dim=3: must be a multiple of 4"),
        ([TOWER, "model.precision=float16"], "model.precision=float16 is unknown"),
        (["+model.labels=huber"], "model.labels goes with a class of your own, model._target_=package.Class"),
        (["model.name=drlm"], "model.name=drlm is unknown; did you mean dlrm"),
        ([TOWER, "model.table_init_std=-1"], "model.table_init_std=-1: must be greater than or equal to 0"),
        (
            ["model.table_init_std=0.1", "model.table_init_bound=0.2"],
            "^model.table_init_bound=0.2: model.table_init_std=0.1 says another thing .*: set one of the two",
        ),
        (["model=custm", "model.hidden=3"], "no model 'custm'. Did you mean 'custom'?"),
    ],
)
def test_wrong_sections(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        Recipe.of(compose(words))


def test_a_custom_model_needs_its_class_unless_one_is_given() -> None:
    with pytest.raises(UserError, match="model=custom: say which class, model._target_=package.module.Class"):
        make_model(typed("model=custom"), SCHEMA, CPU)


# -- the module ------------------------------------------------------------------------------


def test_a_constructor_gets_what_it_asks_for_by_name() -> None:
    model = made(f"model._target_={HERE}.Asks", "model.embedding_dim=12", "model.hidden=3")
    assert model.given.pop("schema") is SCHEMA
    bags, rows = model.bags, model.rows
    assert model.given == {
        "hidden": 3,
        "embedding_dim": 12,
        "num_dense_features": 1,
        "dense_in_features": 1,
        "dense_device": CPU,
        "device": CPU,
    }
    for tables, kind in ((bags, EmbeddingBagCollection), (rows, EmbeddingCollection)):
        assert isinstance(tables, kind)
        assert all(weight.is_meta for weight in tables.parameters())
    found = [
        (c.name, c.feature_names, c.num_embeddings, c.embedding_dim) for c in bags.embedding_bag_configs()
    ]
    assert found == [("user", ["user"], 50, 12), ("item%2Eid", ["item.id"], 30, 12)]


@pytest.mark.parametrize(
    ("words", "drawn"),
    [
        ([], None),
        (["model.table_init_std=0.25"], Normal(0.0, 0.25)),
        (["model.table_init_bound=0.5"], Uniform(-0.5, 0.5)),
    ],
)
@pytest.mark.parametrize(
    "model", [["model=dlrm"], ["model=wide_deep"], [f"model._target_={HERE}.Asks", "model.hidden=3"]]
)
def test_the_recipe_says_what_tables_first_values_are(
    data: Dataset, model: list[str], words: list[str], drawn: Drawn | None
) -> None:
    config = Recipe.of(compose([*model, *words, "model.embedding_dim=8"])).model
    module = make_called(config, data, CPU).module
    tables = group_tables(collections_of(module), lambda name, weights: TableOptimizer("sgd", 0.1), 1)
    assert len(tables.tables) >= 2
    for table in tables.tables:
        assert table.drawn_from == (drawn or Uniform.usual(table.rows))


SEQUENCES = (
    SparseFeature("item", 30, table="goods"),
    SparseFeature("user", 50),
    SparseFeature("seen", 30, table="goods", sequence=5),
    SparseFeature("words", 90, sequence=0),
)


def test_sequences_with_a_target_are_apart_for_who_takes_both_collections() -> None:
    asks = (f"model._target_={HERE}.Asks", "model.embedding_dim=12", "model.hidden=3")
    schema = Schema((), SEQUENCES)
    assert schema.targets == {"seen": "item"}
    model = made(*asks, schema=schema)
    assert [c.feature_names for c in model.rows.embedding_configs()] == [["item", "seen"]]
    assert [c.feature_names for c in model.bags.embedding_bag_configs()] == [["user"], ["words"]]
    model = made(*asks, schema=Schema((), (SEQUENCES[0], SEQUENCES[2])))
    assert model.bags is None


def test_a_target_is_one_feature_and_sequences_have_one_dimension() -> None:
    with pytest.raises(DataError, match="seen could be compared with item or other, which share its table"):
        _ = Schema((), (*SEQUENCES, SparseFeature("other", 30, table="goods"))).targets
    kinds = SparseFeature("kind", 9, dim=4), SparseFeature("kinds", 9, table="kind", dim=4, sequence=5)
    with pytest.raises(UserError, match="tables 'goods' and 'kind' have rows of 12 and 4 values"):
        made(
            f"model._target_={HERE}.Asks",
            "model.embedding_dim=12",
            "model.hidden=3",
            schema=Schema((), (*SEQUENCES, *kinds)),
        )


def test_what_the_recipe_sets_is_not_replaced_and_defaults_stay() -> None:
    model = made(f"model._target_={HERE}.Defaults", "model.num_dense_features=7")
    assert model.given == {"num_dense_features": 7, "embedding_dim": 32}
    assert made(f"model._target_={HERE}.Defaults", "model.embedding_dim=8").given["embedding_dim"] == 8
    assert (
        made(f"model._target_={HERE}.Defaults", schema=Schema((), SCHEMA.sparse)).given["num_dense_features"]
        == 1
    )


def test_a_function_and_arguments_that_are_objects() -> None:
    words = (f"model._target_={HERE}.make_tower", "model.activations=[{_target_: torch.nn.ReLU}]")
    assert isinstance(made(*words).activation, nn.ReLU)


@pytest.mark.parametrize("words", [DEEP_FM, DCN], ids=["SimpleDeepFMNN", "DLRM_DCN"])
def test_torchrecs_models_work_unchanged(data: Dataset, words: tuple[str, ...]) -> None:
    config = typed(*words)
    model = with_rows(make_model(config, data.schema, CPU))
    batch = next(data.batches("train", 64))
    called = Called.of(model, config)
    loss, output = called(batch)
    expected = model(dense_features=batch.dense, sparse_features=batch.sparse).squeeze(1)
    name = "binary_cross_entropy" if words is DEEP_FM else "binary_cross_entropy_with_logits"
    assert torch.equal(loss, getattr(nn.functional, name)(expected, batch.labels))
    scores = called.prediction(output).sigmoid() if words is DEEP_FM else called.prediction(output)
    torch.testing.assert_close(scores, expected.detach())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model._target_=no_such_package.Tower"],
            "there is no module 'no_such_package'. It is looked for in the",
        ),
        ([f"model._target_={HERE}.Towr"], f"{HERE} has no 'Towr'. Did you mean 'Tower'?"),
        ([f"model._target_={HERE}s.Tower"], "tests.model has no 'modelss'. Did you mean 'models'?"),
        (
            ["model._target_=torch.nn.functional"],
            "is a module: name a class of torch.nn.Module, or a function",
        ),
        (
            ["model._target_=collections.OrderedDict"],
            "is the class OrderedDict: name a class of torch.nn.Module",
        ),
        ([f"model._target_={HERE}.a_module"], "is a Linear: name a class of torch.nn.Module"),
        ([f"model._target_={HERE}.not_a_module"], "makes a int, not a torch.nn.Module"),
        (
            [TOWER, "model.hiden=3"],
            "model.hiden: model._target_=.*Tower has no such argument. Did you mean 'hidden'?",
        ),
        ([TOWER, "model.embeding_dim=8"], "Did you mean 'embedding_dim'?"),
        ([TOWER, "model.zzz=8"], "has no such argument. It takes hidden, activation$"),
        ([TOWER], "needs hidden, which has no value: set model.hidden=VALUE"),
        (DCN[:1], "needs dense_arch_layer_sizes, .*: set model.dense_arch_layer_sizes=VALUE model.over"),
        ([DCN[0], *DCN[2:]], "model.embedding_dim has no value in this recipe: set it"),
        ([TOWER, "model.hidden=-1"], r"its constructor raised RuntimeError: .*models.py, line \d+\)$"),
        ([f"model._target_={HERE}.Raises"], r"raised ValueError: two lines \(.*models.py, line \d+\)$"),
        ([TOWER, "model.hidden={_target_: torch.nn.ReLUU}"], "model.hidden: cannot be made: "),
        (
            [TOWER, "model.hidden=3", "model.table_init_bound=0.1"],
            "^model.table_init_bound=0.1: .*Tower takes no tables of recpipe's, and makes its own: set",
        ),
    ],
)
def test_what_cannot_be_made_is_one_line(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        made(*words)
    assert "\n" not in str(refused.value)


def test_faults_of_a_module_that_is_imported_are_told_with_their_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, code, said in (
        (
            "lacks",
            "x = 1\nimport not_installed_here\n",
            "ModuleNotFoundError: No module named 'not_installed_here'",
        ),
        ("breaks", "x = 1\n1 / 0\n", "ZeroDivisionError: division by zero"),
        ("mistyped", "x = 1\nclass\n", "SyntaxError: .*"),
    ):
        (tmp_path / f"model_that_{name}.py").write_text(code)
        said = rf"cannot import model_that_{name}: {said} \({tmp_path}/model_that_{name}.py, line 2\)"
        with pytest.raises(UserError, match=said):
            made(f"model._target_=model_that_{name}.Tower")


# -- installed packages ----------------------------------------------------------------------

PACKAGED = """
from torch import nn
class P(nn.Module):
    def __init__(self, hidden, schema):
        super().__init__()
        self.layer = nn.Linear(len(schema.dense), hidden)
"""


def test_an_installed_model_is_chosen_by_name(install) -> None:
    install("towers", "hidden: 5\nloss: huber\n", PACKAGED, "model")
    config = typed("model=towers", "model.embedding_dim=8")
    assert (config.name, config.target, config.loss) == ("towers", None, "huber")
    assert make_model(config, SCHEMA, CPU).layer.out_features == 5
    assert make_model(typed("model=towers", "model.hidden=7"), SCHEMA, CPU).layer.out_features == 7
    with pytest.raises(UserError, match="model=towers and model._target_=a.B each choose a model"):
        compose(["model=towers", "model._target_=a.B"])


def test_an_installed_model_that_cannot_be_imported(install) -> None:
    install("towers", "{}\n", None, "model")
    with pytest.raises(
        PluginLoadError, match="model towers .* cannot be imported from 'towers_pkg.plugin:P': Runt"
    ):
        made("model=towers")


def test_an_installed_model_does_not_take_the_place_of_recpipes_own(install) -> None:
    install("dlrm", "hidden: 5\n", PACKAGED, "model")
    assert isinstance(Recipe.of(compose()).model, ModelConfig)


class Named(nn.Module):
    """Has parameters that are called as keys of recpipe's own."""

    def __init__(self, loss: str = "hinge", labels: int = 3, name: str = "tower") -> None:
        super().__init__()
        self.said = loss, labels, name


class Needs(nn.Module):
    def __init__(self, precision: str) -> None:
        super().__init__()


def renamed(its_loss: str) -> Named:
    return Named(loss=its_loss)


def test_a_parameter_with_a_name_of_recpipes_keeps_its_default() -> None:
    assert made(f"model._target_={__name__}.Named").said == ("hinge", 3, "tower")


@pytest.mark.parametrize("word", ["model.loss=huber", "model.labels=clicked", "model.name=mine"])
def test_a_value_for_it_is_refused(word: str) -> None:
    key = word.partition("=")[0]
    with pytest.raises(
        UserError, match=rf"^{key}: recpipe reads this key itself, and .*Named has a parameter"
    ):
        made(f"model._target_={__name__}.Named", word)


def test_one_that_needs_a_value_is_refused() -> None:
    with pytest.raises(UserError, match=r"^model.precision: recpipe reads.*def make\(its_precision\)"):
        made(f"model._target_={__name__}.Needs")


def test_a_function_that_renames_it_is_the_way() -> None:
    words = f"model._target_={__name__}.renamed", "model.its_loss=rank", "model.loss=huber"
    assert typed(*words).loss == "huber"
    assert made(*words).said == ("rank", 3, "tower")


def test_a_class_in_folders_without_an_init_file(tmp_path, monkeypatch) -> None:
    inside = tmp_path / "without_init" / "deeper"
    inside.mkdir(parents=True)
    (inside / "towers.py").write_text("from tests.model.models import Tower\n")
    monkeypatch.syspath_prepend(tmp_path)
    target = "model._target_=without_init.deeper.towers.Tower"
    assert type(made(target, "model.hidden=8")) is type(made(TOWER, "model.hidden=8"))
