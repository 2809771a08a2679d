"""The studies of reduced precision: codes, sums in 16 bits, outliers and ranges, against counts by hand."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from recpipe_deeprecsys.characterize import precision, task
from recpipe_deeprecsys.characterize.emulated import BLOCK, Coded, Emulated, Range, Sums16, exact, split
from recpipe_deeprecsys.characterize.operators import FC
from recpipe_deeprecsys.characterize.precision import of_outputs, of_tensor
from recpipe_deeprecsys.tests.test_characterize import Machine
from recpipe_low_precision.dense import Inputs, weight_scales
from torch import nn

from recpipe.config.compose import compose
from recpipe.run import run
from tests.quantizing import small_checkpoint

torch.manual_seed(0)
NORMAL = torch.randn(200, 500)


def codes(weight: torch.Tensor, bits: int = 8) -> torch.Tensor:
    largest = 2 ** (bits - 1) - 1
    return (weight.double() / of_tensor(weight, largest)[:, None]).round()


@pytest.mark.parametrize("bits", [1, 2, 4, 7, 8])
def test_a_split_is_exact_and_its_main_part_has_so_many_bits(bits: int) -> None:
    every = codes(NORMAL)
    main, outliers = split(every, bits)
    assert torch.equal(main + outliers, every)
    assert main.min() >= -(2 ** (bits - 1))
    assert main.max() <= 2 ** (bits - 1) - 1
    assert bool(outliers.any()) == (bits < 8)


def test_outliers_of_normal_weights_are_as_dense_as_their_tails() -> None:
    """Codes beyond -64..63 are weights beyond half of the largest."""
    _, outliers = split(codes(NORMAL), 7)
    beyond = 63.5 / 127 * float(NORMAL.abs().max())
    assert float((outliers != 0).double().mean()) == pytest.approx(math.erfc(beyond / math.sqrt(2)), rel=0.05)


def test_sums_of_16_bits_saturate_and_without_outliers_do_not() -> None:
    inputs = torch.full((2, 10), 255.0, dtype=torch.float64)
    weights = torch.tensor([[127.0] * 10, [1.0] * 10], dtype=torch.float64)
    whole, apart = Sums16(), Sums16(7)
    found = whole(inputs, weights)
    assert found.tolist() == [[32767.0, 2550.0]] * 2
    assert (whole.saturated, whole.sums) == (2, 4)
    assert torch.equal(apart(inputs, weights)[:, 1], exact(inputs, weights)[:, 1])
    # 63 * 255 * 10 is more than 16 bits can say, too: what is left of the first row is the outliers' 64.
    assert apart(inputs, weights)[0, 0] == 32767 + 64 * 255 * 10
    assert Sums16(3)(inputs, weights)[0, 0] == 127 * 255 * 10


def test_pairs_of_products_saturate_before_they_are_added() -> None:
    """255 * 127 + 255 * 127 is cut, and then taken away from."""
    inputs = torch.full((1, 4), 255.0, dtype=torch.float64)
    weights = torch.tensor([[127.0, 127.0, -127.0, 0.0]], dtype=torch.float64)
    assert Sums16()(inputs, weights).item() == 32767 - 255 * 127


@pytest.mark.parametrize("block", [2, 6, 256])
def test_sums_are_those_of_a_loop(block: int) -> None:
    draw = torch.Generator().manual_seed(2)
    inputs = torch.randint(0, 256, (3, 11), generator=draw).double()
    weights = torch.randint(-127, 128, (2, 11), generator=draw).double()
    found = Sums16(None, block)(inputs, weights)
    for sample, output in ((0, 0), (1, 1), (2, 0)):
        products = [int(a * b) for a, b in zip(inputs[sample], weights[output], strict=True)] + [0]
        whole = 0
        for low in range(0, 12, block):
            own = 0
            for at in range(low, min(low + block, 12), 2):
                pair = max(-32768, min(32767, sum(products[at : at + 2])))
                own = max(-32768, min(32767, own + pair))
            whole += own
        assert found[sample, output].item() == whole


def test_sums_go_on_in_32_bits_after_a_block() -> None:
    inputs = torch.full((1, 2 * BLOCK), 127.0, dtype=torch.float64)
    weights = torch.ones(1, 2 * BLOCK, dtype=torch.float64)
    assert Sums16()(inputs, weights).item() == 2 * BLOCK * 127 > 2**15
    alone = inputs[:, :BLOCK] * 2 + 1
    assert Sums16()(alone, weights[:, :BLOCK]).item() == 2**15 - 1  # 255 * 256 in one block


def test_an_odd_number_of_inputs_and_codes_of_8_bits_are_exact_in_32() -> None:
    linear = nn.Linear(7, 3)
    x = torch.rand(5, 7) - 0.3
    inputs = Range.between(float(x.min()), float(x.max()), 255)
    coded = Coded.of(linear, inputs, of_outputs(linear.weight.detach(), 127), 127)
    weight = (coded.codes * coded.scales[:, None]).float()
    wanted = nn.functional.linear(inputs.rounded(x), weight, linear.bias)
    torch.testing.assert_close(Emulated(linear, coded)(x), wanted)
    torch.testing.assert_close(Emulated(linear, coded, Sums16(6))(x), wanted)


def test_an_emulated_layer_without_codes_is_the_layer() -> None:
    linear, x = nn.Linear(7, 3), torch.rand(2, 5, 7)
    assert torch.equal(Emulated(linear)(x), linear(x))
    rounded = Emulated(linear, outputs=Range.between(0.0, 1.0, 3))(x)
    assert len(rounded.unique()) <= 4


@pytest.mark.parametrize(("low", "high", "zero"), [(-1.0, 3.0, 64), (0.5, 2.0, 0), (-2.0, -1.0, 255)])
def test_zero_is_exact_in_every_range(low: float, high: float, zero: int) -> None:
    own = Range.between(low, high, 255)
    assert own.zero == zero
    assert own.rounded(torch.zeros(1)).item() == 0.0
    error = (own.rounded(torch.tensor([low, high])) - torch.tensor([low, high])).abs().max()
    assert float(error) <= 0.5001 * own.scale
    assert Range.between(0.0, 0.0, 255).rounded(torch.zeros(2)).tolist() == [0.0, 0.0]


def test_ranges_of_least_squares_are_better_where_tails_are_heavy() -> None:
    heavy = torch.distributions.StudentT(2.5).sample((40, 500))
    seen = Inputs()
    seen.widen(heavy)
    seen.count(heavy)
    for bits in (8, 4):
        most = 2**bits - 1
        least, whole = Range(*seen.coded(most), most), Range.between(seen.low, seen.high, most)
        assert _error(least.rounded(heavy), heavy) < _error(whole.rounded(heavy), heavy)
        largest = 2 ** (bits - 1) - 1
        errors = [
            _error(coded.codes * coded.scales[:, None], heavy)
            for scales in (of_tensor, of_outputs, weight_scales)
            for coded in [Coded.of(_layer(heavy), whole, scales(heavy, largest), largest)]
        ]
        assert errors == sorted(errors, reverse=True)


def _layer(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0])
    linear.weight.data = weight
    return linear


def _error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted.double()).norm())


def test_a_checkpoint_is_taken_apart_and_studied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "Machine", Machine)
    monkeypatch.setattr(precision, "SAMPLES", 500)
    checkpoint = small_checkpoint(tmp_path / "run")
    words = ["task=characterize", f"characterize.source={checkpoint}", "characterize.study=true"]
    words += ["characterize.batch_sizes=[32]", "characterize.seconds=0.001", "characterize.batches=4"]
    (model,) = run(compose(words), tmp_path / "found", words)["models"]
    assert (model["name"], model["batches"][0]["batch_size"]) == (str(checkpoint), 32)
    assert model["batches"][0]["classes"][FC]["per_weight"] == 64
    assert {table["name"]: table["rows"] for table in model["tables"]}["d"] == 4000
    assert model["reuse"]["batch_size"] == 250
    rows = model["precision"]
    assert "reduced precision" in (tmp_path / "found" / "characterize.html").read_text()
    by = {name: [row for row in rows if row["study"] == name] for name in ("sums", "ranges", "net-aware")}
    whole, saturating, *apart, longer, shorter = by["sums"]
    assert saturating["error"] >= whole["error"]
    assert [row["bits"] for row in apart] == [7, 6, 5, 4]
    outliers = [row["outliers"] for row in apart]
    assert outliers == sorted(outliers)
    assert 0 < outliers[0] < outliers[-1] < 1
    saturated = [row["saturated"] for row in (saturating, *apart)]
    assert saturated == sorted(saturated, reverse=True)
    assert apart[-1]["error"] == pytest.approx(whole["error"])  # nothing saturates any more
    assert apart[0]["saturated"] >= longer["saturated"] >= shorter["saturated"]
    for tensor, _, output, _ in (by["ranges"][:4], by["ranges"][4:]):
        assert output["error"] < tensor["error"]
    assert by["ranges"][-1]["error"] < by["ranges"][4]["error"]
    for every, aware in (by["net-aware"][:2], by["net-aware"][2:]):
        assert aware["error"] < every["error"]
    # Four bits change the model more than eight do.
    assert abs(by["ranges"][4]["ne_loss"]) > abs(by["ranges"][0]["ne_loss"])
