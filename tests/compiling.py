"""Programs of packages: compiled once for all of pytest's processes, for a compilation takes 8 s of a core.

Two models have the same program if they differ in their weights alone, which are kept in a file of their own,
but for those of layers in low precision, which the compiler puts into the program.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree

from recpipe.answers import package, programs
from recpipe.private_api.compiled import compile_program


def share(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Until ``patch`` ends, what has been compiled is in ``folder``."""

    def compiled(
        program: ExportedProgram, march: str | None, width: int, frozen: bool = False
    ) -> tuple[memoryview, list[str]]:
        name = f"program-{_named(program, march, width, frozen)}"
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # until the file is closed
            content, flags = folder / f"{name}.pt2", folder / f"{name}.json"
            if not flags.exists():
                made, own = compile_program(program, march, width, frozen)
                content.write_bytes(made)
                flags.write_text(json.dumps(own))
            return memoryview(content.read_bytes()), json.loads(flags.read_text())

    patch.setattr(programs, "compile_program", compiled)


def _named(program: ExportedProgram, march: str | None, width: int, frozen: bool) -> str:
    """A hash of all that what is compiled depends on."""
    examples = [tuple(value.shape) for value in pytree.tree_leaves(program.example_inputs)]
    found = hashlib.sha256(repr((str(program), examples, march, width, frozen)).encode())
    for name, value in sorted({**program.constants, **program.state_dict}.items()):
        assert isinstance(value, torch.Tensor), name
        if name in program.state_dict and not frozen:
            continue
        found.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        found.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


class Uncompiled:
    """What stands for a compiled program: the exported one, run as it is."""

    def __init__(self, file: str) -> None:
        exported = torch.export.load(file)
        self.module, self.structure, self.loader = exported.module(), exported.call_spec.in_spec, self

    def get_constant_fqns(self) -> list[str]:
        """None: it has all of them itself."""
        return []

    def load_constants(self, *_: object, **__: object) -> None:
        """Takes none."""

    def boxed_run(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Its output of inputs that lie in memory in their order, as a compiled one takes them to."""
        assert all(one.is_contiguous() for one in inputs)
        args, kwargs = pytree.tree_unflatten(inputs, self.structure)
        found = self.module(*args, **kwargs)
        return list(found) if isinstance(found, tuple) else [found]


@contextmanager
def uncompiled() -> Iterator[None]:
    """Packages made in the block take no compiler and load in the block alone, where their programs run as
    torch.export has them: for tests of what is around a program."""

    def kept(program: ExportedProgram, *_: object, **__: object) -> tuple[memoryview, list[str]]:
        example, program.example_inputs = program.example_inputs, None  # which torch would pickle
        content = io.BytesIO()
        torch.export.save(program, content)
        program.example_inputs = example
        return content.getbuffer(), []

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(programs, "compile_program", kept)
        patch.setattr(package, "compiler", lambda: "none")
        patch.setattr(torch._inductor, "aoti_load_package", Uncompiled)
        yield
