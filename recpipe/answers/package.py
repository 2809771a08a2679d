"""``recpipe package``: what a server needs of a model, and nothing else, as a directory.

    model.recpipe/
      manifest.json           inputs, how raw values become them, tables, versions, processor, digests
      manifest.sha256         the manifest's own digest, as sha256sum writes it
      dense.pt2               the dense part, compiled by AOTInductor: a zip file with a shared library
      dense.safetensors       its parameters
      program.pt2             the dense part as torch.export has it, to compile it for another processor
      dense_onednn.pt2        dense.pt2 with linear layers by oneDNN, if that is measured faster at some sizes
      dense_low.pt2, program_low.pt2
                              the same in low precision, of a checkpoint with such layers; compiled programs
                              are left out where another one is measured faster at every size
      tables/*.safetensors    "rows" uint8 [rows, bytes of a row]
      maps/*.safetensors      of ids that got rows as they came: "keys" int64 [n], ascending, "rows" int32 [n]
      golden.safetensors      a batch and its scores
      popularity.safetensors  if asked for: how often training looked up each row
      encoding.json           of data from files: the features, by which a server makes inputs of raw values
      score.py                loads and scores the package with torch and fbgemm_gpu alone
      effects/                if asked for: what corrects the logit (``recpipe.answers.effects``)
      retriever/, candidates/ if asked for: what finds candidates (``recpipe.answers.candidates``)
      manifest.sig            if asked for: the signature of manifest.json, Ed25519

No file is pickled. The directory is written under another name, tried, and then renamed.
"""

from __future__ import annotations

import copy
import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from torch import nn

from recpipe.answers import score
from recpipe.answers.candidates import (
    ITEMS,
    RETRIEVER,
    Retrieval,
    of_index,
    of_packaged,
    require_of_user,
)
from recpipe.answers.effects import packaged_effects, takes_last_layer
from recpipe.answers.encoded import write_encoding
from recpipe.answers.manifest import RETRIEVAL, PrivateKey, is_package, private_key, write_manifest
from recpipe.answers.parts import GOLDEN, MAPS, Parts, of_checkpoint, of_package
from recpipe.answers.programs import (
    DENSE,
    VNNI,
    chosen_programs,
    chosen_set,
    compiled_for,
    made_up_inputs,
    needs_vnni,
    save_constants,
    usable,
    with_onednn,
)
from recpipe.checkpoint.averaged import WEIGHTS
from recpipe.common.console import alone, capture_logs
from recpipe.common.files import exchanged, sync, unwritable
from recpipe.common.owned import require_absent, written_alone
from recpipe.common.process import quieted
from recpipe.common.tensors import save_tensors
from recpipe.common.words import readable_bytes
from recpipe.errors import UserError, shown
from recpipe.plugin.offers import entry, imported, offered
from recpipe.private_api.compiled import compiler
from recpipe.tasks.process import prepare_process

log = logging.getLogger("recpipe")
MOST_SAMPLES = 200_000
"""Held-out samples that are scored for the reference figures unless the user says how many."""
WORDS = (
    "instruction_set",
    "dense",
    "reference",
    "popularity",
    "sign",
    "overwrite",
    "weights",
    "index",
    "effects",
)


class Options:
    """What the user says of a package; ``UserError`` if that is not possible here."""

    def __init__(
        self,
        instruction_set: str | None = None,
        dense: str = "measured",
        reference: bool | int | str = True,
        popularity: bool | int | str = False,
        sign: str | Path | None = None,
        overwrite: bool | str = False,
        weights: str | None = None,
        index: str | Path | None = None,
        effects: str | Path | None = None,
    ) -> None:
        if dense not in DENSE:
            raise UserError(f"dense={shown(dense)}: choose one of {', '.join(DENSE)}")
        self.dense = dense
        """Which programs it may have."""
        self.key: PrivateKey | None = None if sign is None else private_key(Path(sign))
        """What the package is signed with; None: it is not."""
        replaces, held_out, counted = map(_asked, (overwrite, reference, popularity))
        if not isinstance(replaces, bool):
            raise UserError(f"overwrite={shown(overwrite)}: say true or false")
        self.overwrite = replaces
        """Whether a package that is there is replaced."""
        if held_out is None:
            raise UserError(
                f"reference={shown(reference)}: say true, false, or how many held-out samples to score"
            )
        self.reference = MOST_SAMPLES if held_out is True else int(held_out)
        """So many held-out samples are scored for the reference figures; 0: it has none."""
        if not counted and counted is not False:
            raise UserError(
                f"popularity={shown(popularity)}: give true, or how many training samples to read"
            )
        self.popularity = {True: 0, False: None}[counted] if isinstance(counted, bool) else counted
        """In so many training samples lookups are counted, 0: in all; None: they are not."""
        if weights is not None and weights not in WEIGHTS:
            raise UserError(f"weights={shown(weights)}: choose one of {', '.join(WEIGHTS)}")
        self.weights = weights
        """``last``, or the averages ``ema`` or ``swa``; None: the averages, if training made any."""
        self.chosen = chosen_set(instruction_set)
        self.index = None if index is None else Path(index).expanduser()
        """The index in which the package finds candidates; None: it ranks those that it is given."""

        self.effects = None if effects is None else Path(effects).expanduser()
        """The run whose effects correct the model; None: nothing does."""

    def of_retriever(self) -> Options:
        """Those of the query's tower, whose vectors are judged by what they find."""
        made = copy.copy(self)
        made.key, made.reference, made.popularity, made.index, made.effects = None, 0, None, None, None
        return made


def _asked(word: str | bool | int) -> bool | int | None:
    """What ``word`` says: true, false, or a number of samples, of at most 15 digits; None: none of these."""
    text = str(word)
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else None


def package_command(words: Sequence[str]) -> int:
    """``recpipe package CHECKPOINT DIRECTORY [instruction_set=avx2|avx512] [dense=low|float32]
    [reference=false|SAMPLES] [popularity=true|SAMPLES] [sign=KEY] [overwrite=true]
    [weights=last] [index=INDEX] [effects=RUN] [shards=N ...]``."""
    options = dict(word.partition("=")[::2] for word in words[2:])
    if "shards" in options:  # that command makes the package, and cuts it
        shard: Any = imported("command", entry("command", "shard", offered("command")))
        return int(shard.run("package", words))
    unknown = next((key for key in options if key not in WORDS), None)
    if unknown is not None:
        raise UserError(f"recpipe package has no {shown(unknown)}; it has {', '.join(WORDS)}")
    made = Options(**options)
    prepare_process()
    package_for(Path(words[0]), Path(words[1]), None, made, screen=True)
    return 0


def package_for(
    checkpoint: Path, directory: Path, model: nn.Module | None, options: Options, screen: bool
) -> Path:
    """Write the package ``directory`` of ``checkpoint``, or of the newest one in that folder; returns it.

    ``checkpoint`` may be a package too, whose dense part is then compiled anew. ``model``: the module, if
    training was given one in Python. A package in ``directory`` is replaced if ``options`` say so. What it
    does is said on the terminal if ``screen``. ``UserError`` if there is a package already, if another
    process writes there, if there is no C++ compiler, if the model cannot be packaged, and if the package
    does not score as the model does.
    """
    if compiler() is None:
        raise UserError(
            "a package is compiled, and there is no C++ compiler here: install g++ (apt-get install g++), or "
            "name yours in the environment variable CXX"
        )
    directory = directory.expanduser()
    free = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
    if not free and not is_package(directory):
        raise UserError(f"{directory} exists and is no package: name another directory, or remove it")
    checkpoint = checkpoint.expanduser()
    replaces = options.overwrite or checkpoint.resolve() == directory.resolve()
    require_absent("", directory, replaces)
    if options.popularity is not None and is_package(checkpoint):
        raise UserError(f"{checkpoint} is a package, without training data: leave out popularity=")
    with alone(), quieted(), capture_logs(None, screen=screen):
        with written_alone("", directory, replaces, ("package", str(checkpoint))):
            last_layer = options.effects is not None and takes_last_layer(options.effects)
            parts = (
                of_package(checkpoint)
                if is_package(checkpoint)
                else of_checkpoint(checkpoint, model, options.weights, last_layer=last_layer)
            )
            found = of_packaged(checkpoint, parts.content) if is_package(checkpoint) else None
            found = found if options.index is None else of_index(options.index)
            with beside(directory) as partial:
                difference = _write(partial, parts, options, found)
        size = readable_bytes(sum(file.stat().st_size for file in directory.rglob("*") if file.is_file()))
        log.info("wrote %s: %s, golden scores within %.1e of the model's", directory, size, difference)
    return directory


def _write(folder: Path, parts: Parts, options: Options, found: Retrieval | None = None) -> float:
    """Write all files into ``folder``, with the candidates that were ``found``, and score the golden batch
    with them; returns how far its scores are from the model's."""
    chosen, layers = options.chosen, parts.content["layers"]
    used = usable(parts.programs, layers, options.dense, chosen)
    if options.dense == "measured":
        used = with_onednn(used, parts.content)
    for part in ("tables", MAPS) if MAPS in parts.content else ("tables",):
        (folder / part).mkdir()
    parts.write_tables(folder)
    if options.popularity is not None:
        parts.content["popularity"] = parts.popularity(folder, options.popularity)
    parts.content.update(write_encoding(folder, parts.preparation))
    if options.effects is not None:
        parts.content.update(packaged_effects(options.effects, parts.checkpoint, folder, parts.content))
    if found is not None:
        parts.content[RETRIEVAL] = found.write(folder, parts.preparation)
        _write_retriever(folder, found, options.of_retriever())
    shutil.copyfile(Path(score.__file__), folder / "score.py")
    for program in parts.programs:
        program.save(folder)
    log.info("compiling for %s, which takes some seconds", chosen.name)
    example: tuple[Any, dict[str, Any]] = (made_up_inputs(parts.content, 3), {})
    flags = [flag for program in used for flag in program.compile(folder, chosen, example)]
    save_constants(folder, used)
    if chosen.name == "avx512" and used[-1].low and needs_vnni(layers):
        flags.append(VNNI)
    content = {
        **parts.content,
        "compiled": compiled_for(chosen, flags),
        "programs": [program.about(first) for first, program in enumerate(used)],
        "golden": {
            "file": GOLDEN,
            "samples": len(parts.programs[0].scores),
            "tolerance": parts.programs[0].bound,
            "threads": 1,
            "programs": [
                {"file": p.file, "golden": p.golden, "tolerance": p.bound, "low": p.low}
                for p in parts.programs
            ],
        },
    }
    golden = {**parts.golden, **{program.golden: program.scores for program in (*parts.programs, *used)}}
    save_tensors(folder / GOLDEN, golden)
    write_manifest(folder, content)
    try:
        scorer = score.Scorer(folder, mapped=True)  # the tables may be larger than memory
    except score.PackageError as fault:
        raise UserError(f"the package does not score as the model does: {fault}") from fault
    # From here on the package's own scores are what other machines must get.
    golden |= zip((program.golden for program in used), scorer.golden_scores(), strict=True)
    content["golden"]["difference_to_model"] = scorer.difference
    content["programs"], content["measured"] = chosen_programs(used, scorer)
    needed = {about[key] for about in content["programs"] for key in ("file", "constants")}
    for name in {name for program in used for name in (program.compiled, program.constants)} - needed:
        if name is not None:
            (folder / name).unlink()
    kept = {about["golden"] for about in (*content["programs"], *content["golden"]["programs"])}
    save_tensors(folder / GOLDEN, {name: golden[name] for name in (*parts.golden, *sorted(kept))})
    # The scorer goes on as one of the package with these programs does.
    made = {own.about["file"]: own for own in scorer.programs}
    scorer.programs = [made[about["file"]] for about in content["programs"]]
    for own, about in zip(scorer.programs, content["programs"], strict=True):
        own.about, own.first = about, about["from"]
    if not options.reference:
        content.pop("reference", None)
    elif "effects" in content:
        content.pop("reference", None)
        log.info("no reference figures: the effects have learnt from the held-out samples")
    elif (figures := parts.reference(scorer, options.reference)) is not None:
        content["reference"] = figures
    write_manifest(folder, content, options.key)
    return scorer.difference


def _write_retriever(folder: Path, found: Retrieval, options: Options) -> None:
    """Write the package of the query's tower into a package's ``folder``, which has the candidates."""
    (folder / RETRIEVER).mkdir()
    _write(folder / RETRIEVER, found.parts, options)
    preparation = found.parts.preparation
    assert preparation is not None
    assert preparation.features is not None
    require_of_user(folder / RETRIEVER, preparation.features, pq.read_schema(folder / ITEMS).names)


@contextmanager
def beside(directory: Path) -> Iterator[Path]:
    """A new directory that takes the place of ``directory`` at the end of the block, and is removed after an
    error."""
    partial = None
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        partial.chmod(0o755)
        yield partial
        if not (directory.exists() and exchanged(partial, directory)):
            old = partial.with_name(f"{partial.name}.old")
            if directory.exists():
                directory.rename(old)
            partial.rename(directory)
            shutil.rmtree(old, ignore_errors=True)
        sync(directory.parent)
    except OSError as fault:
        raise unwritable(directory, fault, "choose another directory") from fault
    finally:
        if partial is not None:
            shutil.rmtree(partial, ignore_errors=True)
