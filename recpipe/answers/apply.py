"""``recpipe apply``: a package, whole or cut into shards, and the deltas that follow it become the package of
the later step.

What comes out has the tables, maps and parameters of a package that is made of that step's checkpoint, bit by
bit, and so its scores. Its golden batch, its reference figures and its compiled code are those of the base.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from recpipe.answers import score
from recpipe.answers.delta import APPLIED, MANIFEST, Content, Delta, Version, deltas_in, following, with_ids
from recpipe.answers.effects import apply_coefficients, say_learnt
from recpipe.answers.manifest import PrivateKey, is_package, private_key, read_manifest, write_manifest
from recpipe.answers.package import beside
from recpipe.answers.parts import GOLDEN
from recpipe.answers.programs import Program
from recpipe.common.console import alone, capture_logs
from recpipe.common.owned import require_absent, written_alone
from recpipe.common.process import quieted
from recpipe.common.tensors import save_tensors
from recpipe.common.words import readable_bytes
from recpipe.errors import UserError, shown
from recpipe.plugin.offers import entry, imported, offered
from recpipe.tasks.process import prepare_process

log = logging.getLogger("recpipe")
WORDS = ("out", "trust", "sign", "overwrite")
CUT = "plan.json"
"""Of the directory of a package that is cut into shards."""


def apply_command(words: Sequence[str]) -> int:
    """``recpipe apply BASE DELTA... [out=DIRECTORY] [trust=PUBKEY] [sign=KEY] [overwrite=true]``."""
    base = Path(words[0]).expanduser()
    if (base / CUT).is_file() and not is_package(base):
        of_cuts: Any = imported("command", entry("command", "apply-shards", offered("command")))
        return int(of_cuts.run("apply", words))
    return apply_words(words, apply_deltas)


def apply_words(words: Sequence[str], apply: Callable[..., Version]) -> int:
    """Carry out what the words of ``recpipe apply`` say by ``apply``, which takes what ``apply_deltas``
    does; returns 0."""
    named = [word for word in words[1:] if word.partition("=")[0] not in WORDS]
    options = dict(word.partition("=")[::2] for word in words[1:] if word not in named)
    if options.get("overwrite", "false").lower() not in ("true", "false"):
        raise UserError(f"overwrite={shown(options['overwrite'])}: say true or false")
    base = Path(words[0]).expanduser()
    target = Path(options.get("out", base)).expanduser()
    key = private_key(Path(options["sign"])) if "sign" in options else None
    trust = Path(options["trust"]) if "trust" in options else None
    prepare_process()
    replaces = options.get("overwrite", "false").lower() == "true" or "out" not in options
    with alone(), quieted(), capture_logs(None):
        apply(base, [Path(word).expanduser() for word in named], target, replaces, trust, key)
    return 0


def apply_deltas(
    base: Path,
    given: Sequence[Path],
    target: Path,
    overwrite: bool = False,
    trust: Path | None = None,
    key: PrivateKey | None = None,
) -> Version:
    """Write the package ``target`` of ``base`` and the deltas ``given``, in their order; a directory of
    deltas stands for all that follow. ``target`` may be ``base`` itself. Returns what it has come to.

    ``UserError``, before anything is written, for a delta that is missing, comes twice, is damaged, not
    signed by the owner of ``trust``, or of another chain.
    """
    manifest = read_manifest(base, trust)
    try:
        score.verified(base)
    except score.PackageError as fault:
        raise UserError(str(fault)) from fault
    deltas, version = chained(base, manifest, given, trust)
    if target.exists() and not is_package(target) and any(target.iterdir()):
        raise UserError(f"{target} exists and is no package: name another directory, or remove it")
    require_absent("out", target, overwrite)
    with written_alone("out", target, overwrite, ("apply", str(base))), beside(target) as folder:
        _copy(base, folder, manifest)
        difference = Applied(folder, manifest).take(deltas, version, key)
    say_applied(base, target, deltas, difference)
    return version


def chained(
    package: Path, manifest: Mapping[str, Any], given: Sequence[Path], trust: Path | None
) -> tuple[list[Delta], Version]:
    """The deltas ``given`` that follow the ``package`` with this ``manifest``, one after the other, and what
    it comes to with them; ``UserError`` as ``apply_deltas`` has it."""
    version, deltas = Version.of_package(package, manifest), list[Delta]()
    for place in given:
        for delta in _deltas(place, version, trust):
            version.require_next(delta)
            delta.require_one_kind(manifest)
            version = delta.version
            deltas.append(delta)
    if not deltas:
        raise UserError(f"{given[-1]} has no delta after {version.sequence}, which {package} has already")
    return deltas, version


def say_applied(base: Path, target: Path, deltas: Sequence[Delta], difference: float) -> None:
    """Say what ``target`` is, and by how much golden scores have moved."""
    rows = sum(about["rows"] for delta in deltas for about in delta.content["tables"].values())
    log.info(
        "wrote %s: %s and %d deltas of %s rows, %s; step %s; golden scores moved by up to %.1e",
        *(target, base.name, len(deltas), f"{rows:,}", readable_bytes(sum(d.nbytes for d in deltas))),
        *(f"{deltas[-1].version.step:,}", difference),
    )


def _deltas(place: Path, version: Version, trust: Path | None) -> Iterator[Delta]:
    """The delta ``place``, or those in it that follow ``version``."""
    if (place / MANIFEST).is_file() or not place.is_dir() or not deltas_in(place):
        yield Delta.read(place, trust)
        return
    yield from following(place, version, trust)


def _copy(base: Path, folder: Path, manifest: Mapping[str, Any]) -> None:
    for name in manifest["files"]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(base / name, folder / name)


class Applied:
    """The copy of a package in ``folder``, of which ``manifest`` is that of the original."""

    def __init__(self, folder: Path, manifest: Mapping[str, Any]) -> None:
        self.folder, self.manifest = folder, json.loads(json.dumps(manifest))

    def take(self, deltas: Sequence[Delta], version: Version, key: PrivateKey | None) -> float:
        """Make it the package with these ``deltas``, which is then of this ``version``; returns by how much
        the golden scores have moved at most."""
        manifest = self.manifest
        for delta in deltas:
            for table, ids, rows in delta.rows(manifest):
                self.put(table, ids, rows)
            for name, keys, rows in delta.ids(manifest):
                about = manifest["maps"][name]
                held = score.tensors(self.folder / about["file"])
                made = with_ids(held["keys"].clone(), held["rows"].clone(), keys, rows)
                save_tensors(self.folder / about["file"], dict(zip(("keys", "rows"), made, strict=True)))
                about["ids"] = len(made[0]) - 1
            effects = {about["entity"]: about for about in manifest.get("effects", ())}
            for entity, changed in delta.coefficients(manifest):
                apply_coefficients(self.folder, effects[entity], changed)
            if "learnt" in delta.content:
                say_learnt(self.folder, delta.content["learnt"])
        self._take_dense(deltas)
        manifest["step"], manifest[APPLIED] = version.step, version.to_dict()
        self.seal(version, key)
        for made_anew in ("format", "schema", "files"):
            manifest.pop(made_anew)
        write_manifest(self.folder, manifest)
        before, scorer = score.tensors(self.folder / GOLDEN), self.scorer()
        golden = {name: value.clone() for name, value in before.items()}
        moved = 0.0
        for program, own in zip(scorer.programs, scorer.golden_scores(), strict=True):
            name = program.about["golden"]
            moved = max(moved, float((own - golden[name]).abs().max()))
            golden[name] = own
        save_tensors(self.folder / GOLDEN, golden)
        write_manifest(self.folder, manifest, key)
        return moved

    def put(self, table: str, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Replace the rows ``ids`` int64 [n] of a table by ``rows`` uint8 [n, bytes]."""
        with rows_of(self.folder / self.manifest["tables"][table]["file"]) as there:
            there[ids.numpy()] = rows.numpy()

    def seal(self, version: Version, key: PrivateKey | None) -> None:
        """What is to be done once all is in its place, before the manifest is written."""

    def scorer(self) -> score.Scorer:
        """What scores the golden batch."""
        return NotJudged(self.folder, mapped=True)

    def _take_dense(self, deltas: Sequence[Delta]) -> None:
        """Replace the dense part's parameters, in their file and in the exported programs."""
        files = {p["constants"] for p in self.manifest["programs"]} - {None}
        there = {name: v for f in files for name, v in score.tensors(self.folder / f).items()}
        changed: dict[str, torch.Tensor] = {}
        for delta in deltas:
            changed |= delta.dense(there)
        changed = {name: v for name, v in changed.items() if not same_bits(v, there[name])}
        if not changed:
            return
        require_replaceable(self.manifest, self.folder, changed)
        for file in files:
            held = {name: value.clone() for name, value in score.tensors(self.folder / file).items()}
            save_tensors(self.folder / file, held | {n: v for n, v in changed.items() if n in held})
        for about in self.manifest["golden"]["programs"]:
            exported = torch.export.load(self.folder / about["file"])
            for name, value in exported.state_dict.items():
                if name in changed:
                    value.detach().copy_(changed[name])
            # Written as a package's own is; its scores are not asked for.
            program = Program(exported, torch.empty(0), about["tolerance"], about["low"])
            program.save(self.folder)


class NotJudged(score.Scorer):
    """A package whose golden scores are still those of an earlier one."""

    def check_golden(self) -> float:
        """Nothing is compared."""
        return 0.0


def require_replaceable(
    manifest: Mapping[str, Any], directory: Path, changed: Mapping[str, torch.Tensor]
) -> None:
    """``UserError`` unless the programs of the package ``directory`` take these parameters from a file."""
    low = packed_programs(manifest)
    if low:
        raise UserError(
            f"{directory / low[0]} has the parameters of the dense part in it, packed for low precision, and "
            "they cannot be replaced: make the base with dense=float32 of a checkpoint whose layers are not "
            "quantized (recpipe quantize quantizes tables alone with plugins.low_precision.layers=false)"
        )
    for file, fixed in fixed_in_code(manifest, directory).items():
        found = sorted(changed.keys() & fixed)
        if found:
            raise UserError(
                f"{directory / file}: '{found[0]}' is a number in the compiled code, as in packages of "
                "earlier versions: package the base anew, recpipe package PACKAGE NEW_PACKAGE"
            )


def fixed_in_code(manifest: Mapping[str, Any], directory: Path) -> dict[str, set[str]]:
    """By the file of each program of the package ``directory``, the parameters that are numbers in its
    code."""
    exported = torch.export.load(directory / manifest["golden"]["programs"][0]["file"])
    signature, nodes = exported.graph_signature, exported.graph.nodes
    names = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
    used = {names[node.name] for node in nodes if node.name in names and node.users}
    files = [about["file"] for about in manifest["programs"]]
    return {file: used - score.constants_of(directory / file) for file in files}


def packed_programs(manifest: Mapping[str, Any]) -> list[str]:
    """The files of programs that have the parameters in them, packed for low precision."""
    every = (*manifest["programs"], *manifest["golden"]["programs"])
    return [p["file"] for p in every if p.get("low") or p.get("constants", "") is None]


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one shape and type have the same bits."""
    flat = (each.detach().contiguous().view(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(*flat)


@contextmanager
def rows_of(file: Path) -> Iterator[NDArray[np.uint8]]:
    """In the block, the rows uint8 [rows, bytes] of a package's table, as the file has them, to be written
    to."""
    with file.open("rb") as stream:
        size = int.from_bytes(stream.read(8), "little")
        about = json.loads(stream.read(size))["rows"]
    start = 8 + size + about["data_offsets"][0]
    rows = np.memmap(file, np.uint8, "r+", start, tuple(about["shape"]))
    yield rows
    rows.flush()


def log_command(words: Sequence[str]) -> int:
    """``recpipe log PACKAGE [DIRECTORY]``: prints the chain of the package, with the deltas in DIRECTORY, or
    beside it."""
    package = Path(words[0]).expanduser()
    if not is_package(package) and is_package(package / BASE):
        package = package / BASE
    if len(words) > 2:
        raise UserError("say recpipe log PACKAGE [DIRECTORY]")
    folder = Path(words[1]).expanduser() if len(words) == 2 else package.resolve().parent
    for line in chain_lines(package, folder):
        print(line)
    return 0


BASE = "base.recpipe"
"""The name of the base that a run makes itself, beside its deltas."""


def chain_lines(package: Path, folder: Path) -> Iterator[str]:
    """The chain of ``package`` with the deltas in ``folder``, a line each."""
    manifest = read_manifest(package)
    version = Version.of_package(package, manifest)
    what = f"with delta {version.sequence} of base {version.base[:12]}" if version.sequence else "a base"
    yield f"{package}: step {version.step:,}, {version.digest[:12]}, {what}"
    found = deltas_in(folder) if folder.is_dir() else {}
    for number, directory in found.items():
        try:
            delta = Delta.read(directory)
            state = "in the package" if number <= version.sequence else ""
            if not state:
                version.require_next(delta)
                version = delta.version
        except UserError as fault:
            yield f"{directory.name}  {fault}"
            continue
        yield f"{directory.name}  {_said(delta, state)}"
    yield (
        f"{version.sequence} deltas lead to step {version.step:,}"
        if version.sequence
        else f"no delta in {folder}"
    )


def _entities(told: Content) -> int:
    return sum(own["rows"] for own in told.get("effects", {}).values())


def _said(delta: Delta, state: str) -> str:
    told = delta.content
    rows = sum(table["rows"] for table in told["tables"].values())
    got, lost = (sum(own[what] for own in told["maps"].values()) for what in ("got", "lost"))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(told["time"]))
    parts = [
        f"step {told['step']:,}",
        when,
        f"{rows:,} rows",
        *([f"{got:,} ids got rows, {lost:,} lost theirs"] if told["maps"] else []),
        *(["dense part"] if told["dense"] else []),
        *([f"coefficients of {_entities(told):,} entities"] if "effects" in told else []),
        *([f"{sum(told['left_out'].values()):,} rows left out"] if any(told["left_out"].values()) else []),
        readable_bytes(delta.nbytes),
        delta.digest[:12],
        *([state] if state else []),
    ]
    return ", ".join(parts)
