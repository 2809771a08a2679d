"""Products of all pairs by compiled loops: those of torch's operators, of any shape and in any memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchrec.models.dlrm import InteractionArch

from recpipe.backend import pairs
from recpipe.backend.convert import convert
from recpipe.backend.dense import plain_interaction
from recpipe.tables.group_rows import marked, widened

SHAPES = [(4, 8), (5, 16), (16, 3), (17, 20), (27, 16), (33, 40)]
"""Vectors of a sample, the dense one among them, and numbers of a vector."""


def inputs(count: int, dim: int, samples: int = 37) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    dense, rows = torch.randn(samples, dim), torch.randn(samples, count - 1, dim)
    return dense.requires_grad_(), rows.requires_grad_()


def results(function, dense: torch.Tensor, rows: torch.Tensor) -> dict[str, torch.Tensor]:
    """Products, and the gradients of a weighted sum of them."""
    out = function(dense, rows)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    found = torch.autograd.grad(out, [dense, rows], weights.to(out.dtype))
    return {"out": out.detach(), "dense": found[0], "rows": found[1]}


def error(found: dict[str, torch.Tensor], dense: torch.Tensor, rows: torch.Tensor) -> float:
    """The largest difference from float64's, relative to the largest number."""
    exact = results(plain_interaction, *(x.detach().double().requires_grad_() for x in (dense, rows)))
    return max(float((found[k] - v).abs().max() / v.abs().max()) for k, v in exact.items())


@pytest.mark.parametrize(("count", "dim"), SHAPES)
def test_products_and_gradients_are_those_of_torch(count: int, dim: int) -> None:
    given = inputs(count, dim)
    assert error(results(pairs.pair_products, *given), *given) < 1e-6


@pytest.mark.parametrize("samples", [1, 2, 600])
def test_any_number_of_samples_on_any_number_of_threads(samples: int) -> None:
    given, before, found = inputs(5, 16, samples), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(results(pairs.pair_products, *given))
    finally:
        torch.set_num_threads(before)
    assert error(found[0], *given) < 1e-6
    assert all(torch.equal(found[0][key], other[key]) for other in found[1:] for key in other)


def test_a_product_that_is_left_out_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control of the comparison."""
    right = pairs.differentiate_pairs

    def without_one(*arguments) -> None:
        arguments[4][16] = 0.0  # of the first sample's first product
        right(*arguments)

    given = inputs(5, 16)
    monkeypatch.setattr(pairs, "differentiate_pairs", without_one)
    assert error(results(pairs.pair_products, *given), *given) > 1e-2


def test_a_wider_processor_and_a_narrower_one_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    given, found = inputs(33, 16), []
    for wide in (True, False):
        monkeypatch.setattr(pairs, "has_wide_registers", lambda wide=wide: wide)
        found.append(pairs.pair_products(*given))
    assert torch.equal(*found)


def test_rows_with_room_in_front_give_a_gradient_with_room() -> None:
    """That of a table which has looked them up so, and takes it without a copy."""
    count, dim = 5, 16
    dense, apart = inputs(count, dim)
    wide = torch.full((37, count * dim), 7.0)
    wide[:, dim:] = apart.detach().flatten(1)
    rows = marked(wide[:, dim:].unflatten(1, (count - 1, dim))).requires_grad_()
    expected, found = (results(pairs.pair_products, dense, x) for x in (apart, rows))
    assert all(torch.equal(found[key], value) for key, value in expected.items())
    assert widened(found["rows"].flatten(1), dim) is not None
    assert (wide[:, :dim] == 7).all(), "nothing is written there"


def test_a_gradient_takes_the_place_of_rows_that_nobody_reads_any_more() -> None:
    """Not while the graph is kept, which reads them again."""
    dense, rows = inputs(5, 16)
    expected = results(pairs.pair_products, dense, rows)["rows"]
    weights = torch.randn(37, 26, generator=torch.Generator().manual_seed(2))
    out = pairs.pair_products(dense, rows, True)
    for kept in (True, False):
        (found,) = torch.autograd.grad(out, rows, weights, retain_graph=kept)
        assert (found.data_ptr() == rows.data_ptr()) is not kept
        assert torch.equal(found, expected)
    assert torch.equal(rows, expected)


def test_vectors_whose_numbers_lie_apart() -> None:
    dense, rows = inputs(5, 16)
    expected = pairs.pair_products(dense, rows)
    turned = dense.detach().t().contiguous().t(), rows.detach().transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(pairs.pair_products(*turned), expected)


def test_gradients_can_be_differentiated() -> None:
    dense, rows = (x.detach().double() for x in inputs(4, 3, 2))

    def norm(function) -> torch.Tensor:
        given = [x.float().requires_grad_() for x in (dense, rows)]
        first = torch.autograd.grad(function(*given).square().sum(), given, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), given)[1]

    torch.testing.assert_close(norm(pairs.pair_products), norm(plain_interaction), rtol=1e-4, atol=1e-4)


def test_what_counts_operations_sees_them() -> None:
    (dense, rows), module = inputs(5, 16), InteractionArch(4)
    convert(module, {"dot 4x16": {str(torch.get_num_threads()): {"37": "loops"}}}, measured_only=True)
    with FlopCounterMode(display=False) as counter:
        module(dense, rows)
    assert counter.get_total_flops() == 2 * 37 * 5 * 5 * 16


def test_torchrec_s_module_is_made_by_them_where_they_were_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    given, seen = inputs(5, 16), []
    made = nn.Sequential(InteractionArch(4))
    module, expected = made[0], results(made[0], *given)
    right = pairs.products
    monkeypatch.setattr(pairs, "products", lambda *x: seen.append(len(x[0])) or right(*x))
    for way in ("plain", "cpu", "loops"):
        measured = {"dot 4x16": {str(torch.get_num_threads()): {"37": way}}}
        convert(made, measured, measured_only=True)
        found = results(module, *given)
        assert (found.keys(), seen) == (expected.keys(), [37] if way == "loops" else [])
        for key, value in expected.items():
            torch.testing.assert_close(found[key], value, rtol=2e-5, atol=4e-6)


def test_under_bfloat16_they_round_no_more_than_torch_s_operators() -> None:
    (dense, rows), found = inputs(5, 16), {}
    for way in ("plain", "loops"):
        module = InteractionArch(4)
        convert(module, {"dot 4x16": {str(torch.get_num_threads()): {"37": way}}}, measured_only=True)
        with torch.autocast("cpu", torch.bfloat16):
            found[way] = results(lambda x, rows, module=module: module(x.bfloat16(), rows), dense, rows)
        assert found[way]["out"].dtype == torch.bfloat16
    assert found["loops"]["rows"].dtype == torch.float32
    assert 1e-4 < error(found["loops"], dense, rows) < error(found["plain"], dense, rows)
