"""``trainer.compile``, ``trainer.precision`` and ``model.dropout``: how the dense part is computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import recpipe
from recpipe.config.compose import compose
from recpipe.config.recipe import Recipe
from recpipe.errors import UserError
from tests.setup.test_accumulating import SMALL, difference

WORDS = (*SMALL, "model.top=[8]", "data.batch_size=100", "trainer.progress=false", "optim=sgd")
COMPILED = "trainer.compile={backend: eager}"
"""Traced as by inductor, whose C++ takes long to compile."""


def trained(*words: str) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    with recpipe.train(None, None, *WORDS, *words, quiet=True) as run:
        return {k: v.clone() for k, v in run.model.state_dict().items()}, run.report


# -- torch.compile -----------------------------------------------------------------------------------


def compiled_calls(monkeypatch: pytest.MonkeyPatch) -> list[type]:
    seen: list[type] = []
    before = torch.nn.Module.compile

    def noted(self: torch.nn.Module, *arguments: Any, **named: Any) -> None:
        seen.append(type(self))
        before(self, *arguments, **named)

    monkeypatch.setattr(torch.nn.Module, "compile", noted)
    return seen


def test_a_compiled_dense_part_trains_the_same(monkeypatch, tmp_path: Path) -> None:
    """Also the last batch of an epoch, which is short, and after a checkpoint."""
    seen = compiled_calls(monkeypatch)
    plain, report = trained("trainer.backend=plain")
    assert not seen
    kept = (f"trainer.checkpoint_dir={tmp_path}", "trainer.checkpoint_every=5")
    mine, own = trained(COMPILED, *kept)
    assert [kind.__name__ for kind in seen] == ["DenseArch", "InteractionArch", "OverArch"]
    assert mine.keys() == plain.keys(), "names are those of the model"
    assert difference(mine, plain) < 1e-5
    assert own["quality"]["logloss"] == pytest.approx(report["quality"]["logloss"], abs=1e-5)
    (first, *_) = sorted(tmp_path.glob("step-*.ckpt"))
    rest, _ = trained("trainer.backend=plain", f"resume={first}")
    assert difference(rest, plain) < 1e-5


@pytest.mark.soak
def test_by_inductor_too() -> None:
    plain, _ = trained("trainer.backend=plain")
    words = ("+plugin=hotline", "trainer.split=always", "tiers.resident_bytes=50%")
    for own in (("trainer.compile={backend: aot_eager}",), ("trainer.compile=true", *words)):
        assert difference(trained(*own)[0], plain) < 1e-5


def test_one_kind_of_kernels_is_chosen() -> None:
    with pytest.raises(UserError, match="trainer.compile and trainer.backend=cpu each make the dense part"):
        trained(COMPILED, "trainer.backend=cpu")
    with pytest.raises(UserError, match="trainer.compile.*mode.*fast.*max-autotune|is unknown"):
        trained("trainer.compile={mode: fast}")
    with pytest.raises(UserError, match="trainer.compile: torch.compile .*no_such") as caught:
        trained("trainer.compile={backend: no_such}")
    assert "\n" not in str(caught.value)


# -- precision ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "precision"),
    [
        (["trainer.precision=32-true"], "float32"),
        (["trainer.precision=32"], "float32"),
        (["trainer.precision=bf16-mixed"], "bfloat16"),
        (["model.precision=bfloat16"], "bfloat16"),
        (["model.precision=bfloat16", "trainer.precision=bf16-mixed"], "bfloat16"),
        (["model=deepfm", "trainer.precision=bf16-mixed"], "bfloat16"),
    ],
)
def test_precision_has_lightning_s_names(words: list[str], precision: str) -> None:
    assert Recipe.of(compose(words)).model.precision == precision


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["trainer.precision=16-mixed"], "trainer.precision=16-mixed is not to be had: losses would have"),
        (["trainer.precision=bf16-true"], "weights stay float32, .* choose 32-true or bf16-mixed"),
        (["trainer.precision=64-true"], "tables and their optimizers are float32"),
        (["trainer.precision=half"], "trainer.precision=half is unknown; choose 32-true or bf16-mixed"),
        (["trainer.precision=32-true", "model.precision=bfloat16"], "say different things: leave one"),
    ],
)
def test_what_precision_cannot_be_is_said(words: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        Recipe.of(compose(words))
    assert "\n" not in str(caught.value)


def test_mixed_precision_is_that_of_the_model() -> None:
    words = ("trainer.backend=plain", "model.emulate_bfloat16=true", "trainer.max_steps=3")
    mixed, _ = trained("trainer.precision=bf16-mixed", *words)
    assert difference(mixed, trained("model.precision=bfloat16", *words)[0]) == 0
    assert difference(mixed, trained(*words)[0]) > 1e-6


# -- dropout -----------------------------------------------------------------------------------------


OTHERS = ("dlrm_dcn", "wide_deep", "deepfm", "dcnv2", "xdeepfm", "wukong")


@pytest.mark.parametrize(
    "model", ["dlrm", "finalmlp", *(pytest.param(m, marks=pytest.mark.soak) for m in OTHERS)]
)
def test_dropout_is_by_a_key_of_each_model(model: str) -> None:
    words = (f"model={model}", "model.embedding_dim=4", "trainer.max_steps=4", "trainer.backend=plain")
    words = (*SMALL[:2], *words, "trainer.progress=false", "data.batch_size=100")
    with recpipe.train(None, None, *words, "model.dropout=0.5", quiet=True) as run:
        once = {k: v.clone() for k, v in run.model.state_dict().items()}
    with recpipe.train(None, None, *words, "model.dropout=0.5", quiet=True) as run:
        assert difference(once, dict(run.model.state_dict())) == 0, "the seed's"
    with recpipe.train(None, None, *words, "model.dropout=0.0", quiet=True) as run:
        assert difference(once, dict(run.model.state_dict())) > 1e-4, "names are the same, and values are not"


def test_dropout_sets_shares_of_hidden_values_to_zero() -> None:
    from torchrec.modules.mlp import MLP

    from recpipe.model.dropout import dropping

    torch.manual_seed(1)
    plain = MLP(3, [1000, 500])
    made = dropping(plain, 0.25)
    assert [name for name, _ in made.named_parameters()] == [name for name, _ in plain.named_parameters()]
    values = torch.randn(64, 3)
    zero = (plain(values) == 0).float().mean()
    assert float((made(values) == 0).float().mean()) == pytest.approx(1 - 0.75 * (1 - float(zero)), abs=0.05)
    assert torch.equal(made.eval()(values), plain(values))
    assert dropping(plain, 0.0) is plain
