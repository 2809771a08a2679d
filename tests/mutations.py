"""Damage for files that are read back: bytes, JSON values, values of a trainer.pt, arrays; from a seed."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from recpipe.checkpoint.manifest import MANIFEST, TRAINER, seal

ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        -1,
        0,
        7,
        2**31,
        2**63,
        -(2**70),
        0.5,
        -0.5,
        float("nan"),
        float("inf"),
        "",
        "x",
        "\x1b[31m",
    ),
    *("../../x", "/etc/passwd", [], {}, [[]], [None], {"x": 1}, "\ud800"),
)
"""Values that do not belong where they are put, or only sometimes."""
TENSORS = (
    *(torch.zeros(()), torch.zeros(3), torch.zeros(0, 2), torch.zeros(2, dtype=torch.float64)),
    *(torch.zeros(4, dtype=torch.int64), torch.full((5056,), 255, dtype=torch.uint8)),
    *(
        torch.zeros(3, dtype=torch.bfloat16),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(10, requires_grad=True),
    ),
)


def nested(depth: int) -> str:
    """JSON that recursion does not survive."""
    return "[" * depth + "]" * depth


def reseal(directory: Path, step: int) -> None:
    """A manifest of what lies there now."""
    (directory / MANIFEST).unlink(missing_ok=True)
    seal(directory, step)


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) in a tree of dicts and lists."""
    found: list[tuple[Any, Any]] = []
    todo = [value]
    while todo:
        node = todo.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, item in items:
            found.append((node, key))
            todo.append(item)
    return found


def mutated(rng: random.Random, tree: Any, odd: tuple[Any, ...] = ODD) -> Any:
    """A copy of ``tree`` in which one value is gone, odd, moved or joined by another."""
    tree = _lists(tree)
    container, key = rng.choice(places(tree))
    kind = rng.choice(["drop", "odd", "odd", "swap", "add"])
    if kind == "drop":
        del container[key]
    elif kind == "odd":
        container[key] = copy.deepcopy(rng.choice(odd))
    elif kind == "swap":
        other, theirs = rng.choice(places(tree))
        container[key] = copy.deepcopy(other[theirs])
    elif isinstance(container, dict):
        container[rng.choice(["x", "", "increment_ready", 5])] = copy.deepcopy(rng.choice(odd))
    else:
        container.append(copy.deepcopy(rng.choice(odd)))
    return tree


def _lists(tree: Any) -> Any:
    """A copy with lists for tuples, which can be changed."""
    if isinstance(tree, dict):
        return {k: _lists(v) for k, v in tree.items()}
    return [_lists(v) for v in tree] if isinstance(tree, list | tuple) else tree


def in_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bits flipped, a part cut off, doubled, or replaced."""
    out = bytearray(data)
    kind = rng.choice(["flip", "flip", "cut", "double", "noise", "empty"])
    place = rng.randrange(len(out) + 1) if rng.random() < 0.5 else rng.randrange(min(len(out), 300) + 1)
    if kind == "flip":
        for _ in range(rng.choice([1, 1, 8])):
            if out:
                out[rng.randrange(max(1, place)) if place else 0] ^= 1 << rng.randrange(8)
    elif kind == "cut":
        del out[place:]
    elif kind == "double":
        out[place:place] = out[:place]
    elif kind == "noise":
        out[place : place + 16] = rng.randbytes(16)
    else:
        out.clear()
    return bytes(out)


def _trainer_value(rng: random.Random, directory: Path, step: int) -> None:
    file = directory / TRAINER
    tree = torch.load(file, weights_only=True)
    torch.save(mutated(rng, tree, (*ODD, *TENSORS)), file)
    reseal(directory, step)


def _manifest_value(rng: random.Random, directory: Path, step: int) -> None:
    file = directory / MANIFEST
    file.write_text(json.dumps(mutated(rng, json.loads(file.read_text()))))


def _manifest_bytes(rng: random.Random, directory: Path, step: int) -> None:
    file = directory / MANIFEST
    file.write_bytes(nested(100_000).encode() if rng.random() < 0.1 else in_bytes(rng, file.read_bytes()))


def _file_bytes(rng: random.Random, directory: Path, step: int) -> None:
    file = rng.choice(sorted((directory / "tables").iterdir()) + [directory / TRAINER] * 3)
    file.write_bytes(in_bytes(rng, file.read_bytes()))
    if rng.random() < 0.9:
        reseal(directory, step)


def _array(rng: random.Random, directory: Path, step: int) -> None:
    file = rng.choice(sorted((directory / "tables").iterdir()))
    if file.suffix == ".npy":
        np.save(file, rng.choice(OLD_ARRAYS)(np.load(file)), allow_pickle=True)
    else:
        with safe_open(file, framework="np") as opened:
            told, tensors = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        name = rng.choice(sorted(tensors))
        if rng.random() < 0.3:
            told["DCP_SHARDING_INFO"] = json.dumps(mutated(rng, json.loads(told["DCP_SHARDING_INFO"])))
        elif rng.random() < 0.2:
            tensors[rng.choice(["x", "a.weight", "a.state", "x.weight"])] = tensors.pop(name)
        else:
            tensors[name] = np.ascontiguousarray(rng.choice(ARRAYS)(tensors[name]))
        save_file(tensors, file, told)
    reseal(directory, step)


ARRAYS: tuple[Callable[[Any], Any], ...] = (
    *(np.transpose, np.ravel, lambda a: a[None], lambda a: np.array(1, np.float32), lambda a: a[:-1]),
    *(lambda a: a.astype("f8"), lambda a: a.astype("i4"), lambda a: a.astype("f2")),
    lambda a: np.zeros((0, 4), np.float32),
)
"""Other arrays than the one that a table's file holds."""
OLD_ARRAYS = (
    *ARRAYS,
    *(np.asfortranarray, lambda a: a.astype(">f4"), lambda a: a.astype(object), lambda a: a.view("V4")),
)
"""And those that a .npy file may have."""


def _files(rng: random.Random, directory: Path, step: int) -> None:
    """A file that is missing, too many, another's, a link or a folder."""
    files = [*sorted((directory / "tables").iterdir()), directory / TRAINER]
    file, other = rng.choice(files), rng.choice(files)
    kind = rng.choice(["remove", "copy", "link", "folder", "more"])
    if kind == "copy":
        file.write_bytes(other.read_bytes())
    elif kind == "more":
        other.with_name(rng.choice(["x.npy", "x.weight.npy", "x.safetensors"])).write_bytes(file.read_bytes())
    else:
        file.unlink()
        if kind == "link":
            file.symlink_to(rng.choice(["/etc/passwd", other.name, "../trainer.pt", "nowhere"]))
        elif kind == "folder":
            file.mkdir()
    if rng.random() < 0.7 and not (kind == "link" and not file.exists()):
        reseal(directory, step)


KINDS: tuple[Callable[[random.Random, Path, int], None], ...] = (
    *(_trainer_value, _trainer_value, _trainer_value, _file_bytes),
    *(_manifest_value, _manifest_bytes, _array, _files),
)


def damage(rng: random.Random, directory: Path, step: int) -> str:
    """Do something to a checkpoint; says what."""
    kind = rng.choice(KINDS)
    kind(rng, directory, step)
    return kind.__name__
