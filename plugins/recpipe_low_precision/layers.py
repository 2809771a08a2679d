"""Linear layers of a finished model in low precision: bfloat16, or int8 with ranges from calibration.

A layer in int8 has weights in codes -127 to 127 with a scale for each output, and inputs in codes 0 to 255 or
127, with one scale and one code for 0. Products are added up exactly; bias and result are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torchrec.modules.crossnet import LowRankCrossNet

from recpipe.answers.stored import replace_module
from recpipe.backend.matmul import has_bfloat16_units
from recpipe.common.saved import Damaged
from recpipe.private_api import onednn_takes_bfloat16
from recpipe.private_api.int8 import EIGHT_BITS, LARGEST, SEVEN_BITS, int8_linear, int8_run

FLOAT32 = "fp32"
LAYER_TYPES = ("bfloat16", "int8")


@dataclass(frozen=True)
class Layer:
    """How a linear layer is computed. ``scale``, ``zero`` and ``most`` are of an int8 layer's input: value =
    scale * (code - zero), codes from 0 to ``most``."""

    type: str
    scale: float = 1.0
    zero: int = 0
    most: int = EIGHT_BITS

    def __post_init__(self) -> None:
        fits = self.most in (EIGHT_BITS, SEVEN_BITS) and 0 <= self.zero <= self.most
        if self.type not in LAYER_TYPES or not fits or not 0 < self.scale < float("inf"):
            raise Damaged("a layer has no known type or range")

    @property
    def low(self) -> float:
        """The smallest input that it can tell apart."""
        return -self.zero * self.scale

    @property
    def high(self) -> float:
        """The largest."""
        return (self.most - self.zero) * self.scale


def is_linear(module: nn.Module) -> bool:
    """Whether ``module`` can be computed in low precision: a ``torch.nn.Linear`` itself, since a derived
    class may compute something else."""
    return type(module) is nn.Linear


class CrossLayers(nn.Module):
    """TorchRec's ``LowRankCrossNet`` with a linear layer for each of its products: x_l+1 = x_0 * (W_l (V_l
    x_l) + b_l) + x_l. It shares the parameters of ``net``, and computes the same bits."""

    def __init__(self, net: LowRankCrossNet) -> None:
        super().__init__()
        self.V = nn.ModuleList(_linear(weight) for weight in net.V_kernels)
        self.W = nn.ModuleList(_linear(weight) for weight in net.W_kernels)
        self.bias = net.bias
        self.train(net.training)

    def forward(self, x_0: torch.Tensor) -> torch.Tensor:
        """float32 [B, N] -> [B, N]."""
        x = x_0
        for v, w, bias in zip(self.V, self.W, self.bias, strict=True):
            x = x_0 * (w(v(x)) + bias) + x
        return x


def _linear(weight: nn.Parameter) -> nn.Linear:
    """The layer of ``weight`` [O, I] without a bias."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = weight
    return layer


def show_products(module: nn.Module) -> None:
    """Put ``CrossLayers`` wherever ``module`` has a ``LowRankCrossNet`` itself, so that its products are
    linear layers, too."""
    nets = {path: net for path, net in module.named_modules() if type(net) is LowRankCrossNet}
    for path, net in nets.items():
        replace_module(module, path, CrossLayers(net))


class LowPrecisionLinear(nn.Linear):
    """Takes the place of ``linear``, whose float32 parameters it shares.

    ``layers``: how it can be computed, by type; ``scales`` float32 [out_features] is of the weights in int8.
    ``kind`` says how it is computed: one of these types, or fp32.
    """

    weight16: torch.Tensor
    bias16: torch.Tensor | None
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor

    def __init__(
        self, linear: nn.Linear, layers: Iterable[Layer], scales: torch.Tensor | None = None
    ) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.layers = {layer.type: layer for layer in layers}
        self.kind = next(iter(self.layers), FLOAT32)
        self.train(linear.training)
        with torch.no_grad():
            if "bfloat16" in self.layers:
                self.register_buffer("weight16", linear.weight.bfloat16(), False)
                bias16 = None if linear.bias is None else linear.bias.bfloat16()
                self.register_buffer("bias16", bias16, False)
            if "int8" in self.layers:
                assert scales is not None, "weights in int8 have scales"
                self.register_buffer("codes", weight_codes(linear.weight, scales), False)
                self.register_buffer("scales", scales, False)
                self.register_buffer("zeros", torch.zeros(len(scales), dtype=torch.int64), False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> float32 [..., out_features]."""
        if self.kind == FLOAT32:
            return super().forward(x)
        if self.kind == "bfloat16":
            return self._bfloat16(x)
        own = self.layers["int8"]
        return int8_linear(x, own.scale, own.zero, own.most, self.codes, self.scales, self.zeros, self.bias)

    def runs(self, kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """The layer computed as ``kind`` on x float32 [B, in_features], by the operators that compiled code
        uses; weights in int8 are packed."""
        if kind == "int8":
            own = self.layers["int8"]
            return int8_run(self.codes, self.scales, self.bias, own.scale, own.zero, own.most)
        return self._bfloat16 if kind == "bfloat16" else super().forward

    def _bfloat16(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x.bfloat16(), self.weight16, self.bias16).float()


def bfloat16_has_units() -> bool:
    """Whether this CPU multiplies bfloat16 matrices in hardware, and oneDNN may use that."""
    return has_bfloat16_units() and onednn_takes_bfloat16()


def weight_codes(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """int8 [O, I] of ``weight`` float32 [O, I], with ``scales`` float32 [O]."""
    return (weight / scales[:, None]).round().clamp(-LARGEST, LARGEST).to(torch.int8)


def put_layers(module: nn.Module, layers: Mapping[str, Layer], scales: Mapping[str, torch.Tensor]) -> None:
    """Compute the linear layers of ``module`` at these paths as ``layers`` says; ``Damaged`` if there is none
    at a path, or if its ``scales`` do not fit."""
    if layers:
        show_products(module)
    for path, layer in layers.items():
        try:
            linear = module.get_submodule(path)
        except AttributeError:
            linear = None
        if linear is None or not is_linear(linear):
            raise Damaged(f"the model has no linear layer '{path}'")
        assert isinstance(linear, nn.Linear)
        own = scales.get(path)
        if layer.type == "int8" and (own is None or own.shape != linear.weight.shape[:1]):
            raise Damaged(f"the weights of '{path}' have no scales")
        replace_module(module, path, LowPrecisionLinear(linear, [layer], own))


def low_layers(module: nn.Module) -> list[LowPrecisionLinear]:
    """The layers of ``module`` that are not computed in float32."""
    found = (m for m in module.modules() if isinstance(m, LowPrecisionLinear))
    return [layer for layer in found if layer.kind != FLOAT32]


@contextmanager
def in_float32(module: nn.Module) -> Iterator[None]:
    """In the block, every linear layer of ``module`` is computed in float32."""
    kinds = [(layer, layer.kind) for layer in low_layers(module)]
    try:
        for layer, _ in kinds:
            layer.kind = FLOAT32
        yield
    finally:
        for layer, kind in kinds:
            layer.kind = kind
