"""A converted model computes what it did, under the same names, and hides nothing from hooks."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn
from torchrec.models.dlrm import InteractionArch
from torchrec.modules.crossnet import LowRankCrossNet
from torchrec.modules.deepfm import FactorizationMachine
from torchrec.modules.mlp import MLP, Perceptron
from torchrec.sparse.jagged_tensor import KeyedTensor

from recpipe.backend import chain as chains
from recpipe.backend import convert as back
from recpipe.backend import dense
from recpipe.backend.convert import convert, revert
from recpipe.tables.group_rows import is_padded, marked
from tests.backend.models import BATCH, DENSE, DIM, FEATURES, MODELS, Own, assert_close, batch, made, step


class Calls:
    """How often each kernel ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of = dict.fromkeys(("chain", "interact", "cross", "factorize"), 0)
        for name in self.of:
            monkeypatch.setattr(back, name, self._counting(name, getattr(back, name)))

    def _counting(self, name, kernel):
        def call(*arguments):
            self.of[name] += 1
            return kernel(*arguments)

        return call


@pytest.fixture
def calls(monkeypatch) -> Calls:
    return Calls(monkeypatch)


KERNELS = {
    "dlrm": {"chain": 2, "interact": 1},
    "dcn": {"chain": 2, "cross": 1},
    "deep_fm": {"chain": 3, "factorize": 1},
    "own": {"chain": 7},
}


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_gradients_are_those_of_the_modules(name, threads, calls) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        model = made(name)
        expected = step(model)
        assert not any(calls.of.values())
        convert(model)
        found = step(model)
        used = {kernel: count for kernel, count in calls.of.items() if count}
        assert used == KERNELS[name], "the back end's kernels made this step"
        assert_close(found, expected)
        revert(model)
        again = step(model)
        assert all(torch.equal(again[key], value) for key, value in expected.items())
        assert not any("forward" in module.__dict__ for module in model.modules())
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_choice_computes_the_same(name) -> None:
    model = made(name)
    expected = step(model)
    everything = {part: {str(torch.get_num_threads()): {"64": "onednn"}} for part in linear_parts(model)}
    convert(model, everything)
    assert_close(step(model), expected)


def linear_parts(model: nn.Module) -> set[str]:
    return {f"linear {m.in_features}-{m.out_features}" for m in model.modules() if isinstance(m, nn.Linear)}


def test_a_wrong_gradient_is_noticed(monkeypatch) -> None:
    """Negative control of the comparison above."""
    model = made("dlrm")
    expected = step(model)
    right = dense._weight_gradient
    monkeypatch.setattr(dense, "_weight_gradient", lambda gradient, x: right(gradient, x) * 1.001)
    convert(model)
    with pytest.raises(AssertionError, match="dense_arch"):
        assert_close(step(model), expected)


@pytest.mark.parametrize("name", MODELS)
def test_names_and_parameters_stay(name) -> None:
    model, other = made(name), MODELS[name]()
    names, ids = list(model.state_dict()), [id(p) for p in model.parameters()]
    modules = [(n, type(m)) for n, m in model.named_modules()]
    convert(model)
    assert list(model.state_dict()) == names
    assert [id(p) for p in model.parameters()] == ids
    assert [(n, type(m)) for n, m in model.named_modules()] == modules
    other.load_state_dict(model.state_dict(), strict=True)
    assert_close(step(model), step(other))


def test_copies_and_pickles_have_parameters_of_their_own() -> None:
    model = made("own")
    convert(model)
    expected = step(model)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)
        assert_close(step(other), expected)
        with torch.no_grad():
            for p in model.parameters():
                p.sub_(1)


# -- hooks -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_hooks_of_every_module_see_what_they_saw(name) -> None:
    """One module at a time: its inputs and outputs, forward and backward, and the step's results."""
    model = made(name)
    expected = step(model)
    for path, module in model.named_modules():
        if path.partition(".")[2].startswith("embedding_bag") or path.startswith("tables"):
            continue
        seen = {}
        for converted in (False, True):
            (convert if converted else revert)(model)
            seen[converted] = seen_by_hooks(model, module, expected)
        assert len(seen[True]) == len(seen[False]), path
        assert seen[True] or isinstance(module, nn.ParameterList), path
        for found, theirs in zip(seen[True], seen[False], strict=True):
            torch.testing.assert_close(found, theirs, rtol=2e-5, atol=4e-6, msg=lambda m, p=path: f"{p}: {m}")


def seen_by_hooks(model: nn.Module, module: nn.Module, expected) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []

    def keep(*values) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                seen.append(value.detach().clone())
            elif isinstance(value, tuple | list):
                keep(*value)
            elif isinstance(value, KeyedTensor):
                keep(value.values())

    handles = [
        module.register_forward_pre_hook(lambda m, inputs: keep(inputs)),
        module.register_forward_hook(lambda m, inputs, out: keep(inputs, out)),
    ]
    handles.append(module.register_full_backward_hook(lambda m, into, out: keep(into, out)))
    try:
        assert_close(step(model), expected)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def test_steps_are_found_once_until_somebody_changes_the_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(MLP(6, [8, 4]), nn.Linear(4, 2))
    convert(model)
    x, found = torch.randn(5, 6), []
    monkeypatch.setattr(chains, "_add", lambda *given, add=chains._add: (found.append(given[0]), add(*given)))
    expected = model(x)
    once = len(found)
    for _ in range(3):
        assert model(x).equal(expected)
    assert len(found) == once
    handle = model[0].register_forward_hook(lambda m, inputs, out: out * 2)
    doubled = model[1](2 * model[0]._mlp(x))
    assert model(x).equal(doubled)
    assert not doubled.equal(expected)
    handle.remove()
    assert model(x).equal(expected)
    perceptron = model[0]._mlp[1]
    perceptron._activation_fn = torch.tanh
    assert model(x).equal(model[1](torch.tanh(perceptron._linear(model[0]._mlp[0](x)))))
    perceptron._linear = nn.Linear(8, 4)
    assert model(x).equal(model[1](torch.tanh(perceptron._linear(model[0]._mlp[0](x)))))
    perceptron.forward = lambda given: 3 * given[:, :4]
    assert model(x).equal(model[1](3 * model[0]._mlp[0](x)[:, :4]))
    model[0] = nn.Linear(6, 4)
    assert model(x).equal(model[1](model[0](x)))


def test_a_hook_that_changes_an_output_changes_the_result() -> None:
    results = []
    for converted in (False, True):
        model = made("dlrm")
        inner = next(m for m in model.dense_arch.modules() if isinstance(m, nn.Linear))
        inner.register_forward_hook(lambda m, inputs, out: out * 2)
        if converted:
            convert(model)
        results.append(step(model))
    assert_close(results[1], results[0])
    assert not torch.allclose(results[0]["out"], step(made("dlrm"))["out"])


def test_hooks_of_all_modules_see_every_call(calls) -> None:
    model = made("dlrm")
    convert(model)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda m, i, o: seen.append(type(m)))
    try:
        step(model)
    finally:
        handle.remove()
    assert seen.count(nn.Linear) == 5
    assert not any(calls.of.values())


# -- what goes the modules' own way -------------------------------------------------------------


class Doubling(nn.Linear):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


class Stack(nn.Sequential):
    """Without a forward of its own it is a Sequential."""


def test_overridden_forwards_are_left_alone(calls) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(Doubling(4, 6), nn.ReLU(), Stack(nn.Linear(6, 3), nn.ReLU()))
    patched = nn.Linear(3, 2)
    patched.forward = lambda x: x[:, :2] * 7  # type: ignore[method-assign]
    model.append(patched)
    x = torch.randn(9, 4)
    expected = model(x)
    convert(model)
    assert "forward" not in model[0].__dict__
    torch.testing.assert_close(model(x), expected)
    assert calls.of["chain"] == 1
    revert(model)
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Perceptron(4, 3, activation=nn.Sigmoid()),
        lambda: MLP(4, [6, 3], activation="swish_layernorm"),
        lambda: nn.Sequential(nn.ReLU(), nn.Flatten()),
        lambda: nn.Sequential(nn.Linear(4, 3).double()),
    ],
)
def test_other_activations_and_types_stay(make, calls) -> None:
    torch.manual_seed(1)
    model = make()
    x = torch.randn(9, 4, dtype=next((p.dtype for p in model.parameters()), torch.float32))
    expected = model(x)
    convert(model)
    torch.testing.assert_close(model(x), expected)
    if all(p.dtype == torch.float32 for p in model.parameters()) and not isinstance(model, nn.Sequential):
        return
    assert not any(calls.of.values())


def plain_only(model: nn.Module, calls: Calls, *inputs: torch.Tensor) -> None:
    before = model(*inputs)
    convert(model)
    assert torch.equal(model(*inputs), before)
    assert not any(calls.of.values())


@pytest.mark.parametrize(
    "x",
    [
        torch.randn(0, 4),
        torch.randn(4),
        torch.randn(3, 5, 4),
        torch.randn(5, 4, device="meta"),
        nn.Parameter(torch.randn(2, 1, 4)),
    ],
    ids=["empty", "vector", "three dimensions", "meta", "parameter"],
)
def test_other_shapes_and_devices_go_the_modules_own_way(x, calls) -> None:
    model = nn.Sequential(nn.Linear(4, 3, device=x.device), nn.ReLU(), nn.Linear(3, 2, device=x.device))
    convert(model)
    out = model(x)
    assert out.shape == (*x.shape[:-1], 2)
    assert out.device == x.device
    assert not any(calls.of.values())


def test_evaluation_is_converted_too(calls) -> None:
    for name in MODELS:
        model = made(name).eval()
        with torch.no_grad():
            expected = model(*batch())
            convert(model)
            torch.testing.assert_close(model(*batch()), expected)
    assert any(calls.of.values())


def test_a_wrong_width_is_told_as_torch_tells_it() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    convert(model)
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        model(torch.randn(5, 6))


def test_traced_programs_have_the_modules_own_operators(calls) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    convert(model)
    x = torch.randn(5, 4)
    traced = torch.jit.trace(model, x, check_trace=False)
    before = calls.of["chain"]
    torch.testing.assert_close(traced(x), model(x))
    assert calls.of["chain"] == before + 1, "the model's own call alone"
    torch.testing.assert_close(torch.func.vmap(lambda row: model(row[None])[0])(x), model(x))
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))


def test_parts_take_empty_batches() -> None:
    """TorchRec's collections do not; a part of a batch may be empty all the same."""
    rows = torch.empty(0, len(FEATURES), DIM)
    model = made("dlrm")
    convert(model)
    out = model.over_arch(model.inter_arch(model.dense_arch(torch.empty(0, DENSE)), rows))
    out.sum().backward()
    assert out.shape == (0, 1)


# -- autograd ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_a_graph_that_is_kept_is_differentiated_again(name) -> None:
    model = made(name)
    convert(model)
    out = model(*batch()).square().sum()
    wanted = [p for p in model.parameters() if p.requires_grad]
    first = torch.autograd.grad(out, wanted, retain_graph=True)
    second = torch.autograd.grad(out, wanted)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_differentiated(name) -> None:
    """A penalty on gradients, as some losses have it."""
    results = []
    for converted in (False, True):
        model = made(name)
        if converted:
            convert(model)
        dense_features, sparse = batch()
        dense_features.requires_grad_()
        out = model(dense_features, sparse)
        (slope,) = torch.autograd.grad(out.sum(), dense_features, create_graph=True)
        (out.square().mean() + slope.square().sum()).backward()
        results.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    assert_close(results[1], results[0])


def test_frozen_parameters_get_no_gradient() -> None:
    results = []
    for converted in (False, True):
        model = made("dlrm")
        for p in model.dense_arch.parameters():
            p.requires_grad_(False)
        next(model.over_arch.parameters()).requires_grad_(False)
        if converted:
            convert(model)
        results.append(step(model))
    assert_close(results[1], results[0])
    assert not any(name.startswith("dense_arch") for name in results[1])


def test_a_weight_that_is_no_number_reaches_the_output() -> None:
    model = made("dlrm")
    convert(model)
    next(model.over_arch.parameters()).data.fill_(float("nan"))
    assert model(*batch()).isnan().all()


@pytest.mark.parametrize("name", ["dlrm", "own"])
def test_autocast_to_bfloat16_rounds_no_more_than_the_modules_do(name, calls) -> None:
    exact, theirs, mine = step(made(name)), None, None
    for converted in (False, True):
        model = made(name)
        if converted:
            convert(model)
        with torch.autocast("cpu", torch.bfloat16):
            model.zero_grad()
            out = model(*batch())
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
        (out.float() * weights).sum().backward()
        found = {"out": out.detach().float()}
        found |= {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        theirs, mine = (theirs, found) if converted else (found, mine)
    assert calls.of["chain"] > 0
    for key, value in exact.items():
        error, reference = ((found[key] - value).norm() / value.norm() for found in (mine, theirs))
        assert mine[key].dtype == torch.float32
        assert 1e-5 < error < 2 * reference + 1e-3, f"{key}: {error} here, {reference} by autocast"


def test_autocast_to_float16_goes_the_modules_own_way(calls) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    convert(model)
    with torch.autocast("cpu", torch.float16):
        assert model(torch.randn(5, 4)).dtype == torch.float16
    assert not any(calls.of.values())


# -- parts alone -------------------------------------------------------------------------------


def test_the_room_in_proxy_of_rows_takes_the_dense_vector() -> None:
    """Marked rows are not copied, the room alone is written, and gradients are those of a copy."""
    features = len(FEATURES)
    arch = InteractionArch(features)
    convert(arch)
    dense_features = torch.randn(BATCH, DIM, requires_grad=True)
    wide = torch.randn(BATCH, (1 + features) * DIM)
    before = wide.clone()
    values = marked(wide[:, DIM:])
    rows = back.marked(values.unflatten(1, (features, DIM)).requires_grad_())
    copied = before[:, DIM:].clone().view(BATCH, features, DIM).requires_grad_()
    out, expected = arch(dense_features, rows), arch(dense_features, copied)
    assert torch.equal(out, expected)
    assert torch.equal(wide[:, DIM:], before[:, DIM:])
    assert torch.equal(wide[:, :DIM], dense_features)
    gradient = torch.randn_like(out)
    found = torch.autograd.grad(out, (dense_features, rows), gradient)
    theirs = torch.autograd.grad(expected, (dense_features, copied), gradient)
    assert torch.equal(found[0], theirs[0])
    assert torch.equal(found[1], theirs[1])
    assert is_padded(values)
    assert not is_padded(values * 1)
    wider = dense.widened(found[1].flatten(1), DIM)
    assert wider is not None
    assert wider.data_ptr() == found[1].data_ptr() - 4 * DIM, "a table takes it as it lies"
    assert dense.widened(copied.detach().flatten(1), DIM) is None


def test_unmarked_rows_keep_what_lies_in_proxy_of_them() -> None:
    arch = InteractionArch(2)
    convert(arch)
    wide = torch.randn(6, 3 * DIM)
    before = wide.clone()
    arch(torch.randn(6, DIM), wide[:, DIM:].unflatten(1, (2, DIM)))
    assert torch.equal(wide, before)


def test_the_room_goes_from_a_collection_to_the_interaction(monkeypatch) -> None:
    """Through TorchRec's own DLRM, by a collection that has it."""
    model = made("dlrm")
    expected = step(model)
    convert(model)
    collection = model.sparse_arch.embedding_bag_collection
    own, rooms = collection.forward, []

    def roomy(features):
        keyed = own(features)
        wide = torch.cat((torch.zeros(BATCH, DIM), keyed.values()), dim=1)
        keyed._values = marked(wide[:, DIM:])
        rooms.append(wide)
        return keyed

    monkeypatch.setattr(collection, "forward", roomy)
    assert_close(step(model), expected)
    assert rooms[0][:, :DIM].count_nonzero(), "the dense vector was written there"


def test_features_in_another_order_are_put_in_the_models() -> None:
    model = made("dlrm")
    expected = step(model)
    model.sparse_arch._sparse_feature_names.reverse()
    reversed_ = step(model)
    assert not torch.allclose(reversed_["out"], expected["out"])
    convert(model)
    assert_close(step(model), reversed_)


def test_factorization_machine_and_cross_net_of_many_samples() -> None:
    torch.manual_seed(1)
    for module, x in (
        (FactorizationMachine(), [torch.randn(300, 40)]),
        (LowRankCrossNet(40, 2, 8), torch.randn(300, 40)),
    ):
        expected = module(x)
        convert(module)
        torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-4)
    assert dense.factorize(torch.ones(2, 3)).tolist() == [[3.0], [3.0]]


def test_modules_swapped_after_the_conversion_count() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    convert(model)
    model[0] = nn.Linear(4, 5)
    x = torch.randn(7, 4)
    torch.testing.assert_close(model(x), model[0](x).relu())


def test_tables_alone_are_left_alone() -> None:
    model = Own()
    convert(model)
    assert all("forward" not in m.__dict__ for m in model.tables.modules())
    assert model.bottom._mlp[0]._linear.in_features == DENSE
