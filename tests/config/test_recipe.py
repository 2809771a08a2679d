"""Wrong recipes: whatever the overrides, a run starts or one line says why not."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from recpipe import cli
from recpipe.config import compose as config
from recpipe.config.compose import check, check_overrides, choices, compose, readable_errors
from recpipe.config.recipe import Recipe
from recpipe.data.config import ParquetConfig
from recpipe.distributed.ranks import Ranks
from recpipe.errors import UserError
from recpipe.training.dense import try_out

TINY = ("data.samples=300", "data.batch_size=64", "data.table_scale=0.001", "model.embedding_dim=4")
QUIET = ("trainer.progress=false", "trainer.checkpoint_every=null", "trainer.logger=null")
BASES: tuple[tuple[str, ...], ...] = (
    (),
    ("model=dlrm_dcn", "optim=adagrad", "tiers=ssd"),
    ("data=criteo", "data.path=rows.tsv", "+plugin=hotline", "optim=sgd"),
    ("data=parquet", "data.path=rows.parquet", "data.label=click", "data.sparse=[user]"),
    ("task=plan", "tiers=holders"),
    ("task=profile",),
    ("task=compare",),
)
VALUES = (
    "0 -1 1 2 3.5 -0.5 1e9 1e400 nan inf -inf true false null ??? host lru 5% -5% 64MiB 4294967296 "
    "99999999999 99999999999999999999999 [] [1] [1.5] [x] [[1]] {} {a:1} {a:{b:1}} [1,-1] '' 'a_b' ../x "
    "~nobody/x /proc/nope /dev/null ${seed} ${nope} ${oc.env:NOPE} ${data} cuda:7 cuda:² auto csv 'a\tb' "
    "'\x1b[31m' 'a\nb' 'é'"
)
WORDS = VALUES.split(" ")
LONG = ("x" * 5000, "a/" * 2500, "9" * 400, "9" * 5000, "{a:" * 60 + "1" + "}" * 60, "[" * 400 + "]" * 400)


def keys(node: Any, prefix: str = "") -> Iterator[str]:
    for key, value in node.items() if isinstance(node, dict) else ():
        yield f"{prefix}{key}"
        yield from keys(value, f"{prefix}{key}.")


def random_override(rng: random.Random, known: Sequence[str], groups: Sequence[str]) -> str:
    """Any key with any value, mostly; or a group's option, a deleted, new or misspelt key."""
    key = rng.choice(known)
    value = rng.choice(LONG) if rng.random() < 0.05 else rng.choice(WORDS)
    kind = rng.random()
    if kind < 0.1:
        return f"{rng.choice(groups)}={value}"
    if kind < 0.15:
        return f"~{key}"
    if kind < 0.2:
        return f"+{key}.{rng.choice(('new', '1', 'name'))}={value}"
    if kind < 0.25:
        return f"{key[:-1]}={value}"
    return f"{'++' if kind < 0.4 else ''}{key}={value}"


@pytest.mark.parametrize("words", ["tiers=sharded", "tiers.store=sharded"])
def test_rows_on_holders_by_the_name_that_they_had(words: str) -> None:
    before, now = (Recipe.of(compose([*TINY, word])).tiers for word in (words, "tiers=holders"))
    assert before == now
    assert now.described_store(Ranks()) == "holders (host)"


def one_line(error: UserError) -> None:
    text = str(error)
    assert text.isprintable(), repr(text)
    assert len(text) < 1500, text


def applied(base: DictConfig, words: Sequence[str]) -> DictConfig:
    """As Hydra composes, for overrides of values alone: a composition of its own costs too much here."""
    with readable_errors(words):
        recipe = copy.deepcopy(base)
        overrides = OverridesParser.create().parse_overrides(list(words))
        ConfigLoaderImpl._apply_overrides_to_config(overrides, recipe)
    check(recipe)
    return recipe


def fuzz(seed: int, count: int) -> tuple[int, int]:
    """How many recipes of ``count`` random overrides, one to three in each, were refused and were typed."""
    rng = random.Random(seed)
    bases = [compose([*TINY, *base] if "data=" not in "".join(base) else base) for base in BASES]
    known = [list(keys(OmegaConf.to_container(base))) for base in bases]
    options = choices()
    groups = list(options)
    refused = fine = 0
    with pytest.MonkeyPatch.context() as patch:
        # Composing again for each misspelt key would take most of the time.
        patch.setattr(config, "_known_keys", lambda _, found=known[0]: found)
        patch.setattr(config, "choices", lambda found=options: found)
        while count > 0:
            number = rng.randrange(len(bases))
            words = [random_override(rng, known[number], groups) for _ in range(rng.choice((1, 1, 1, 3)))]
            count -= len(words)
            try:
                typed_recipe(bases[number], words, groups)
            except UserError as error:
                refused += 1
                one_line(error)
            except Exception as fault:
                pytest.fail(f"{BASES[number]} {words}: {type(fault).__name__}: {fault}")
            else:
                fine += 1
    return refused, fine


def typed_recipe(base: DictConfig, words: Sequence[str], groups: Sequence[str]) -> None:
    """All that comes before data is read; group options are read alone, since ``base`` has its own."""
    check_overrides(words)
    recipe = Recipe.of(applied(base, [word for word in words if word.split("=")[0] not in groups]))
    try_out(recipe.optim.dense, torch.device("cpu"))


def run_randomly(seed: int, count: int, folder: Path) -> dict[int, int]:
    """Random overrides through the command line; returns how often each status came."""
    rng = random.Random(seed)
    known = list(keys(OmegaConf.to_container(compose())))
    # What bounds the work comes last.
    bounds = (
        *TINY,
        *QUIET,
        "++trainer.max_steps=2",
        "hydra.run.dir=run",
        "++data.tables=null",
        "++data.pooling=1",
    )
    seen: dict[int, int] = {}
    for _ in range(count):
        words = [random_override(rng, known, list(choices()))]
        while words[0].startswith(("task=compare", "task.name")):
            words = [random_override(rng, known, list(choices()))]
        said = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, redirect_stderr(said), redirect_stdout(io.StringIO()):
            patch.chdir(folder)
            patch.delenv("HYDRA_FULL_ERROR", raising=False)
            patch.setattr("sys.argv", ["recpipe", *words, *bounds])
            with pytest.raises(SystemExit) as left:
                cli.main()
        status = left.value.code
        errors = [line for line in said.getvalue().splitlines() if line.startswith("error: ")]
        assert (status, len(errors)) in ((0, 0), (2, 1)), (words, status, said.getvalue())
        assert "Traceback" not in said.getvalue(), words
        assert isinstance(status, int)
        seen[status] = seen.get(status, 0) + 1
    return seen


def test_random_overrides_are_typed_or_refused_in_one_line() -> None:
    refused, fine = fuzz(seed=1, count=200)
    assert refused > 50
    assert fine > 10


def test_random_overrides_run_or_are_refused_in_one_line(tmp_path: Path) -> None:
    seen = dict[int, int]()
    for seed in range(5, 20):  # what a seed draws depends on the options that are installed
        seen |= run_randomly(seed, 3, tmp_path)
        if len(seen) > 1:
            break
    assert seen.keys() == {0, 2}, "the sample is to have both"


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10))
def test_many_random_overrides(tmp_path: Path, seed: int) -> None:
    fuzz(100 + seed, 5000)
    run_randomly(200 + seed, 100, tmp_path)


def test_unknown_top_level_keys_are_the_users_own() -> None:
    assert Recipe.of(compose(["+size=77", "data.batch_size=${size}"])).data.batch_size == 77


def test_values_are_typed() -> None:
    recipe = Recipe.of(compose(["seed=3", "tiers.emulate.latency_us=null", "resume=2024"]))
    assert (recipe.seed, recipe.tiers.emulate.latency_us, recipe.resume) == (3, 0.0, "2024")
    assert recipe.compare is None
    assert Recipe.of(compose(["task=compare"])).compare is not None
    assert recipe.values["data"]["samples"] == 1_000_000


PARQUET = ("data=parquet", "data.path=a.parquet", "data.label=rating", "data.sparse=[user]")
OWN = "model._target_=my_pkg.Tower"


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ([], None),
        ([OWN], None),
        ([OWN, "model.loss=huber"], "values"),
        ([OWN, "model.loss=poisson"], "counts"),
        (["model.loss=huber"], "values"),
        ([OWN, "model.loss={name: huber, delta: 2}"], "values"),
        ([OWN, "model.loss={name: bpr, group: user}"], "clicks"),
        ([OWN, "model.loss=cross_entropy"], "classes"),
        ([OWN, "model.loss={_target_: my_pkg.Loss}"], None),
        ([OWN, "model.loss={rating: huber, buy: {_target_: my_pkg.Loss}}"], {"rating": "values"}),
        ([OWN, "model.loss={_target_: my_pkg.Loss}", "data.label_kind=values"], "values"),
        ([OWN, "model.loss=huber", "data.label_kind=clicks"], "clicks"),
    ],
)
def test_labels_are_of_the_kind_that_the_loss_takes(words: list[str], kind: object) -> None:
    data = Recipe.of(compose([*PARQUET, *words])).data
    assert isinstance(data, ParquetConfig)
    assert data.label_kind == kind


def test_recpipes_own_models_learn_labels_of_their_kind() -> None:
    data = Recipe.of(compose([*PARQUET, "data.label_kind=values"])).data
    assert isinstance(data, ParquetConfig)
    assert data.label_kind == "values"
