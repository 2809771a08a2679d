"""State and switches of torch that its public API does not offer."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed
from torch import nn
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_buffer_registration_hooks,
    _global_forward_hooks,
    _global_forward_pre_hooks,
    _global_module_registration_hooks,
    _global_parameter_registration_hooks,
)
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from recpipe.common.loops import TOLD
from recpipe.common.versions import private

# Looked up here, so that importing this room fails if a release lacks one of them.
graph_is_kept = torch._C._autograd._get_current_graph_task_keep_graph
"""Whether the backward pass under way has ``retain_graph``: saved tensors must then stay as they are."""
functorch_is_active = torch._C._are_functorch_transforms_active
"""Whether a transform such as ``torch.func.grad`` runs what is called."""
forward_number = torch._C._autograd._get_sequence_nr
"""The number that the next operator of a forward pass will get; ``backward_number`` returns it later."""
IncompatibleKeys = nn.modules.module._IncompatibleKeys
"""What ``load_state_dict`` returns: missing keys, unexpected ones."""
_current_node = torch._C._current_autograd_node
_add_to_each = torch._foreach_add_
_copy_each = torch._foreach_copy_
_function_modes = torch._C._len_torch_function_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_HOOKS = (
    _global_forward_pre_hooks,
    _global_forward_hooks,
    _global_backward_pre_hooks,
    _global_backward_hooks,
    _global_buffer_registration_hooks,
    _global_module_registration_hooks,
    _global_parameter_registration_hooks,
    _global_optimizer_pre_hooks,
    _global_optimizer_post_hooks,
)


def steps_are_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks are called before or after the optimizer's steps."""
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return any((*own, _global_optimizer_pre_hooks, _global_optimizer_post_hooks))


def global_hooks() -> int:
    """How many hooks of all modules and all optimizers there are, and modes in this thread."""
    return sum(len(hooks) for hooks in _HOOKS) + int(_function_modes()) + int(_dispatch_modes())


def operators_are_watched() -> bool:
    """Whether a mode of this thread sees each of torch's operators, such as what counts them, and nobody is
    told of the loops in their place."""
    return bool(_dispatch_modes()) and not TOLD


def add_to_each(numbers: list[torch.Tensor], value: int) -> None:
    """Add ``value`` to each tensor in one call."""
    if numbers:
        _add_to_each(numbers, value)


def copy_each(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy each of ``sources`` into its target in one call."""
    if targets:
        _copy_each(targets, sources)


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module`` has been compiled in place, by ``module.compile()``."""
    return module._compiled_call_impl is not None


def backward_number() -> int | None:
    """The forward pass's number of the operator that is being differentiated; None during a forward pass."""
    node = _current_node()
    return None if node is None else int(node._sequence_nr())


def linear_pointwise(*arguments: Any) -> torch.Tensor:
    """oneDNN's linear layer with an operation on its result (``mkldnn::_linear_pointwise``)."""
    out: torch.Tensor = _onednn("_linear_pointwise")(*arguments)
    return out


def onednn_takes_bfloat16() -> bool:
    """Whether oneDNN runs bfloat16 on this CPU."""
    return bool(_onednn("_is_mkldnn_bf16_supported")())


@cache
def _onednn(name: str) -> Any:
    """An operator of oneDNN. It is looked up when it is used, since not every build of torch has it."""
    return private(torch.ops.mkldnn, name)
