"""What of the dense part needs no rows, DLRM's bottom layers for one: compiled by itself when a package is
cut, so that it runs while the questions to the shards are on their way; and the rest by itself.

Two programs are not by nature one program bit by bit: a compiler joins operations across their border. So a
cut has them only if they give the bits of the one program for all numbers of samples that are tried, and a
server takes them only if they do so where it runs.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import Dim, ExportedProgram

from recpipe.answers import score
from recpipe.answers.export import constants_as_buffers
from recpipe.answers.programs import Program, chosen_set, made_up_inputs
from recpipe.common.timing import median_seconds
from recpipe.errors import UserError
from recpipe.private_api.compiled import any_batch_size, compiler, use_onednn

log = logging.getLogger("recpipe")
BOTTOM, TOP = "bottom", "top"
LEAST_SECONDS = 1e-4
"""What takes less, of ``SAMPLES``, is not worth two more programs."""
SAMPLES = 64
TRIED = (1, 2, 3, 7, 16, 64, 65, 256, 1000)
"""Numbers of samples for which bits are compared."""
_TRACED = 3
"""Samples with which the two are exported; they take any number."""


class TwoParts:
    """The programs ``bottom`` and ``top`` of the package ``directory``, which are ``whole`` in two."""

    def __init__(self, directory: Path, files: Mapping[str, str], whole: score.Program) -> None:
        self.whole = whole
        constants = whole.constants or None
        self.bottom, self.top = (
            score.Program(directory, {**whole.about, "file": files[name]}, constants)
            for name in (BOTTOM, TOP)
        )

    def use(self, constants: dict[str, torch.Tensor]) -> None:
        """Take these parameters, as ``whole`` has."""
        self.bottom.use(constants)
        self.top.use(constants)

    def begun(self, dense: torch.Tensor) -> list[torch.Tensor]:
        """What the rest needs of dense features float32 [B, D]."""
        made: list[torch.Tensor] = self.bottom.run.loader.boxed_run([aligned(dense)])
        return made

    def finished(
        self, dense: torch.Tensor, begun: Sequence[torch.Tensor], found: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Scores, as ``whole`` gives them of ``dense`` and what the lookups have ``found``."""
        scores = self.top(dense, [*begun, *found])
        self.whole.last_layer = self.top.last_layer
        return scores

    def gives_the_same(self, manifest: Mapping[str, Any], sizes: Sequence[int]) -> bool:
        """Whether the two give the bits of ``whole`` for made-up inputs of the package with this
        ``manifest``, of so many samples as it is used for."""
        for samples in [own for own in sizes if own >= self.whole.first] or [self.whole.first]:
            dense, found = made_up_inputs(manifest, samples)
            with torch.inference_mode():
                wanted, last = self.whole(dense, [*found]), self.whole.last_layer
                own = self.finished(dense, self.begun(dense), found)
            pairs = [(own, wanted)] + ([] if last is None else [(self.whole.last_layer, last)])
            if not all(one is not None and torch.equal(one, other) for one, other in pairs):
                return False
        return True


def aligned(dense: torch.Tensor) -> torch.Tensor:
    """``dense`` where the whole program would read it."""
    dense = dense.contiguous()
    return dense.clone() if dense.data_ptr() % score.ALIGNMENT else dense


def write_parts(folder: Path, manifest: Mapping[str, Any], wanted: bool | None) -> list[Any]:
    """Write the two parts of each program of the package in ``folder`` into it; returns what
    ``ShardedScorer`` reads of that: the files by program, None for one that stays whole. ``wanted`` None:
    where what needs no rows takes ``LEAST_SECONDS``."""
    if wanted is False:
        return []
    made = [_parts_of(folder, manifest, number, bool(wanted)) for number in range(len(manifest["programs"]))]
    return made if any(made) else []


def _parts_of(folder: Path, manifest: Mapping[str, Any], number: int, wanted: bool) -> dict[str, str] | None:
    about = manifest["programs"][number]
    try:
        score.check_processor(manifest["compiled"])
    except score.PackageError as fault:
        log.info("%s stays in one piece: %s", about["file"], fault)
        return None
    exported = exported_of(folder, manifest, about)
    if exported is None:
        log.info("%s stays in one piece: the package does not say how it was made", about["file"])
        return None
    example = made_up_inputs(manifest, _TRACED)
    parts = in_two(exported, example)
    if parts is None:
        return None
    module = parts[0].module()
    dense, _ = made_up_inputs(manifest, SAMPLES)
    with torch.inference_mode():
        (seconds,) = median_seconds([partial(module, dense)], threads=1)
    if not wanted and seconds < LEAST_SECONDS:
        return None
    if compiler() is None:
        raise UserError(
            "the dense part is compiled in two, and there is no C++ compiler here: install g++, or say "
            "overlap=false"
        )
    chosen = chosen_set(
        manifest["compiled"]["instruction_set"] if manifest["compiled"]["cpu_flags"] else None
    )
    log.info(
        "compiling the dense part in two for %s: without rows it takes %.0f us", chosen.name, 1e6 * seconds
    )
    files = {}
    for name, part in zip((BOTTOM, TOP), parts, strict=True):
        program = Program(part, torch.empty(0), about["tolerance"], about["constants"] is None)
        program.compiled = files[name] = about["file"].replace("dense", name, 1)
        program.compile(folder, chosen, None)
    held = None if about["constants"] is None else score.tensors(folder / about["constants"])
    constants = None if held is None else {key: value.clone() for key, value in held.items()}
    two = TwoParts(folder, files, score.Program(folder, about, constants))
    if two.gives_the_same(manifest, TRIED):
        return files
    for file in files.values():
        (folder / file).unlink()
    log.info("%s stays in one piece: in two it gives other last bits", about["file"])
    return None


def exported_of(
    folder: Path, manifest: Mapping[str, Any], about: Mapping[str, Any]
) -> ExportedProgram | None:
    """What the compiled program ``about`` was made of; None if the package does not say it."""
    low = about["constants"] is None
    files = [own["file"] for own in manifest["golden"]["programs"] if own["low"] == low]
    if not files:
        return None
    exported: ExportedProgram = torch.export.load(folder / files[0])
    if about.get("linear_layers") != "oneDNN" or low:
        return exported
    if "by_onednn" not in about:
        return None
    plain: ExportedProgram = exported.run_decompositions({})
    use_onednn(plain, set(about["by_onednn"]))
    return plain


def in_two(
    exported: ExportedProgram, example: tuple[torch.Tensor, Sequence[torch.Tensor]]
) -> tuple[ExportedProgram, ExportedProgram] | None:
    """What of a dense part needs its dense features alone, and the rest, which takes these features, what the
    first returned, and what the lookups find. ``example``: inputs of the whole. None if the first would
    multiply nothing."""
    module = exported.module()
    nodes = list(module.graph.nodes)
    output = nodes[-1]
    dense, *found = [node for node in nodes if node.op == "placeholder"]
    needs_dense, needs_rows = {dense}, set(found)
    for node in nodes:
        if not needs_rows.isdisjoint(node.all_input_nodes):
            needs_rows.add(node)
        elif not needs_dense.isdisjoint(node.all_input_nodes):
            needs_dense.add(node)
    ahead = {node for node in needs_dense - {dense} if isinstance(node.meta.get("val"), torch.Tensor)}
    returned = output.all_input_nodes
    met = _needed(returned, {dense, *found, *ahead})
    border = [node for node in nodes if node in ahead & met]
    first = _part(module, [dense], border)
    if not any("linear" in str(node.target) or "mm" in str(node.target) for node in first.graph.nodes):
        return None
    rest = _part(module, [dense, *border, *found], returned)
    with torch.no_grad():
        made = first(example[0])
    given = (example[0], *made, *example[1])
    return _exported(first, [dense], given[:1]), _exported(rest, [dense, *border, *found], given)


def _needed(returned: Sequence[fx.Node], given: set[fx.Node]) -> set[fx.Node]:
    """The nodes that are needed for those ``returned``, with those among them that are ``given``."""
    needed, waiting = set[fx.Node](), list(returned)
    while waiting:
        node = waiting.pop()
        if node not in needed:
            needed.add(node)
            waiting += [] if node in given else node.all_input_nodes
    return needed


def _part(module: fx.GraphModule, given: Sequence[fx.Node], returned: Sequence[fx.Node]) -> fx.GraphModule:
    """What computes the nodes ``returned`` of ``module``, a tuple, from those that are ``given``."""
    graph, needed = fx.Graph(), _needed(returned, {*given})
    known = {node: graph.placeholder(f"given_{place}") for place, node in enumerate(given)}
    for node in module.graph.nodes:
        if node in needed and node not in known:
            known[node] = graph.node_copy(node, known.__getitem__)
    graph.output(tuple(known[node] for node in returned))
    return fx.GraphModule(module, graph)


def _exported(
    module: fx.GraphModule, given: Sequence[fx.Node], inputs: tuple[torch.Tensor, ...]
) -> ExportedProgram:
    """``module`` with the dynamic sizes of the nodes that it is ``given``."""
    sizes = tuple(
        {axis: Dim.AUTO for axis, size in enumerate(node.meta["val"].shape) if isinstance(size, torch.SymInt)}
        for node in given
    )
    with any_batch_size():
        program = torch.export.export(module, inputs, dynamic_shapes=sizes, strict=False)
    constants_as_buffers(program)
    return program
