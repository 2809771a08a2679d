"""Linear layers in int8 by oneDNN's own operator, eagerly and in compiled code.

Imported by what needs it and not with the room, since some operators come with torch's quantization.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from recpipe.common.versions import private, private_names

with private_names():
    import torch.ao.quantization.fx._decomposed  # registers the operators that code and decode

    _has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key

_pattern = torch.ops.quantized_decomposed
_quantize = private(_pattern, "quantize_per_tensor").default
_dequantize = private(_pattern, "dequantize_per_tensor").default
_dequantize_rows = private(_pattern, "dequantize_per_channel").default
_prepack = private(torch.ops.onednn, "qlinear_prepack").default
_pointwise = private(torch.ops.onednn, "qlinear_pointwise").default
if not _has_kernel("onednn::qlinear_prepack", "Meta"):
    # Before torch 2.14 it cannot be exported without.
    torch.library.register_fake("onednn::qlinear_prepack")(
        lambda codes, _: codes.new_empty(codes.shape[::-1])
    )
EIGHT_BITS, SEVEN_BITS = 255, 127
"""The largest code of an input; 7 bits are exact on CPUs without VNNI, too."""
LARGEST = 127
"""The largest code of a weight; the smallest is -127, so that codes are symmetric."""


def int8_linear(
    x: torch.Tensor,
    scale: float,
    zero: int,
    most: int,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """A linear layer of x float32 [..., I] in codes 0 to ``most``, x = scale * (code - zero), and of weights
    ``codes`` int8 [O, I] with ``scales`` float32 [O] and ``zeros`` int64 [O], all 0; gives float32 [..., O].

    Eagerly it multiplies decoded values in float32. An exported program multiplies codes, and packs those of
    the weights once where they are frozen.
    """
    own = (scale, zero, 0, most, torch.uint8)
    found = _quantize(x, *own)
    if torch.compiler.is_exporting():
        return _product(found, scale, zero, _prepack(codes, None), scales, zeros, bias)
    x = _dequantize(found, *own)
    weight = _dequantize_rows(codes, scales, zeros, 0, -128, 127, torch.int8)
    return nn.functional.linear(x, weight, bias)


def int8_run(
    codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, scale: float, zero: int, most: int
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The layer of ``int8_linear`` as compiled code runs it, on x float32 [B, I], with its weights packed."""
    packed, zeros = _prepack(codes, None), torch.zeros(len(scales), dtype=torch.int64)

    def layer(x: torch.Tensor) -> torch.Tensor:
        found = (x * (1 / scale)).round_().add_(zero).clamp_(0, most).to(torch.uint8)
        return _product(found, scale, zero, packed, scales, zeros, bias)

    return layer


def _product(
    found: torch.Tensor,
    scale: float,
    zero: int,
    packed: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """float32 [..., O] of inputs in codes, ``found`` uint8 [..., I], and ``packed`` weights."""
    # Nothing comes after the product; an argument for that is ignored, but an empty list cannot be exported.
    after = ("none", [0.0], "")
    made: torch.Tensor = _pointwise(
        found, scale, zero, packed, scales, zeros, bias, 1.0, 0, torch.float32, *after
    )
    return made


@cache
def int8_adds_up() -> bool:
    """Whether products of 8-bit codes are exact on this CPU. Without VNNI, pairs of them are added up in 16
    bits, which saturate; codes of 7 bits do not reach that."""
    width = 256
    layer = int8_run(torch.full((32, width), LARGEST, dtype=torch.int8), torch.ones(32), None, 1.0, 0, 255)
    return bool((layer(torch.full((64, width), 255.0)) == 255 * LARGEST * width).all())
