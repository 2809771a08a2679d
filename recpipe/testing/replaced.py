"""Which functions and constants of libraries have been replaced since they were last looked at."""

from __future__ import annotations

import operator
import sys
import types
import warnings
from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from typing import Any

LIBRARIES = sys.stdlib_module_names | {
    *("torch", "torchrec", "fbgemm_gpu", "torchmetrics", "numpy", "scipy", "numba", "pyarrow", "recpipe"),
    *("lightning", "lightning_fabric", "lightning_utilities", "pytorch_lightning", "hydra", "omegaconf"),
}
"""Top-level packages whose content a plugin must leave alone."""
BUSY = (
    *("torch", "torch.nn.functional", "torch.autograd", "torch.optim", "torchrec", "numpy", "numpy.random"),
    *("numpy.linalg", "torch.Tensor", "torch.nn.modules.module.Module", "torch.nn.modules.linear.Linear"),
    *("torch.optim.optimizer.Optimizer", "torch.optim.sgd.SGD", "torch.optim.adagrad.Adagrad", "random"),
    *("torch.nn.functional", "torch.autograd.function.Function", "torch.random", "time", "math", "builtins"),
    *("torchrec.sparse.jagged_tensor.KeyedJaggedTensor", "torchrec.sparse.jagged_tensor.JaggedTensor"),
)
"""What is looked at in every step; the rest once, at the end."""
_PLAIN = (bool, float, str, bytes)
_Code = tuple[types.FunctionType, types.CodeType, Any, Any]


class Replaced:
    """The content of the modules and classes of ``LIBRARIES`` that are imported when it is made.

    Names that come later are not compared, except a class's new function that hides an inherited one:
    libraries import parts of themselves when these are first used.
    """

    def __init__(self, libraries: Collection[str] = LIBRARIES) -> None:
        self.spaces: dict[str, tuple[Any, dict[str, Any]]] = {}
        self.codes: list[tuple[str, _Code]] = []
        with warnings.catch_warnings():  # of names that are deprecated
            warnings.simplefilter("ignore")
            self._look(libraries)
        self.busy = [(name, *self.spaces[name]) for name in dict.fromkeys(BUSY) if name in self.spaces]

    def _look(self, libraries: Collection[str]) -> None:
        seen: set[int] = set()
        modules = [(n, m) for n, m in list(sys.modules.items()) if isinstance(m, types.ModuleType)]
        waiting: list[tuple[str, Any]] = [(n, m) for n, m in modules if _top(n) in libraries]
        while waiting:
            name, space = waiting.pop()
            if id(space) in seen:
                continue
            seen.add(id(space))
            content = dict(vars(space))
            self.spaces[name] = (space, content)
            for key, value in content.items():
                inner = _space_name(value)
                if _top(inner) in libraries and id(value) not in seen:
                    waiting.append((inner, value))
                elif isinstance(value, types.FunctionType):
                    self.codes.append((f"{name}.{key}", _code(value)))

    def glance(self) -> Iterator[str]:
        """What is replaced at this moment of the most used names: names, and by what."""
        for name, space, content in self.busy:
            yield from _changes(name, space, content)

    def all(self) -> Iterator[str]:
        """What is replaced at this moment: names, and by what."""
        for name, (space, content) in self.spaces.items():
            yield from _changes(name, space, content)
        for name, before in self.codes:
            now = _code(before[0])
            if not all(map(operator.is_, now, before)) and now != before:
                yield f"{name} (its code)"


def _top(name: str) -> str:
    return name.partition(".")[0]


def _space_name(value: Any) -> str:
    """The name of a class or a module; empty for all else."""
    if isinstance(value, type):
        return f"{value.__dict__.get('__module__', 'builtins')}.{value.__qualname__}"
    return value.__name__ if isinstance(value, types.ModuleType) else ""


def _code(function: types.FunctionType) -> _Code:
    return function, function.__code__, function.__defaults__, function.__kwdefaults__


def _changes(name: str, space: Any, content: Mapping[str, Any]) -> Iterator[str]:
    now = vars(space)
    more = isinstance(space, type) and len(now) > len(content)
    if not more and all(map(operator.is_, map(now.get, content), content.values())):
        return  # as nearly all are, and a suite looks at half a million names after each run
    for key, value in content.items():
        other = now.get(key)
        if other is value:
            continue
        # A library may put a wrapper of its own around its function, as torch does with the ``step`` of an
        # optimizer's class when it is first made.
        home = getattr(other, "__globals__", {}).get("__name__", "")
        if getattr(other, "__wrapped__", None) is value and _top(home) == _top(name):
            continue
        # Numbers in small letters count something, in torch and elsewhere.
        constant = isinstance(value, _PLAIN) or (isinstance(value, int) and key.isupper())
        if _acts(value) or (constant and other != value):
            yield f"{name}.{key} ({_described(other)})"
    if more:
        inherited = set(chain.from_iterable(vars(base) for base in space.__mro__[1:]))
        for key in now.keys() - content.keys():
            if key in inherited and _acts(now[key]):
                yield f"{name}.{key} ({_described(now[key])})"


def _acts(value: object) -> bool:
    return callable(value) or isinstance(value, staticmethod | classmethod | property)


def _described(value: Any) -> str:
    """What stands there now, told so that it is the same in every process."""
    function = getattr(value, "__func__", value)
    code = getattr(function, "__code__", None)
    if code is not None:
        place = "/".join(code.co_filename.split("/")[-2:])
        return f"now {code.co_qualname} of {place}, line {code.co_firstlineno}"
    return f"now {value!r}" if isinstance(value, _PLAIN) else f"now a {type(value).__name__}"
