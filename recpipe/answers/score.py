"""Scores batches with the package in this file's directory. Needs torch and fbgemm_gpu, and nothing else.

    from score import Scorer
    scores = Scorer("model.recpipe")(dense, ids, lengths)

A package contains compiled code, which loading runs: load packages that you trust. All files are compared
with manifest.json first, and the golden batch is scored before the first call returns. A damaged package is a
``PackageError``, whatever is wrong with it.
"""

import ctypes
import hashlib
import json
import logging
import mmap
import os
import platform
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import fbgemm_gpu  # noqa: F401  registers the lookup operator
import torch
import torch._inductor

TYPES = {"fp32": 0, "fp16": 1, "int8": 2, "int4": 3, "int2": 4}  # as FBGEMM numbers them
BITS = {"fp32": 32, "fp16": 16, "int8": 8, "int4": 4, "int2": 2}  # of a weight
SCALE_BYTES = 4  # of a row's scale and bias, in types of up to 8 bits
HOST = 3  # FBGEMM's place of a table in memory
SCHEMA, WITH_MAPS, WITH_EFFECTS = 2, 3, 4  # of manifest.json; 3: ids got rows as they came; 4: effects
WITH_SHARDS = 5  # its tables are held by shards
ALIGNMENT = 64  # of tables and inputs, in bytes
MANIFEST, DIGEST, SIGNATURE = "manifest.json", "manifest.sha256", "manifest.sig"
GOLDEN = "golden.safetensors"
MISSING_KEY = -(2**63)  # stands for a missing value among keys
DEFAULT_ROW = 1  # of keys without a row of their own
INTERCEPT, LAST_LAYER = "intercept", "last_layer"  # inputs of effects that are no columns; the latter's width
# is in manifest.json under its name
MOST_BYTES = 256 * 2**20  # of manifest.json
LOOSEST = 5e-2  # tolerance of a golden score, relative to the largest one if that is above 1


class PackageError(Exception):
    """The package cannot be used here; the message names the file or the reason."""


class Scorer:
    """A package, checked and loaded. ``manifest``: its manifest.json. ``difference``: the largest difference
    of the golden batch's scores to those of the machine that made the package; 0 if they are equal bit by
    bit. ``mapped``: tables are the files themselves, mapped, so that processes share their memory; else
    copies. ``maps``: by the places of features whose ids got rows as they came, what has these. ``unknown``:
    how many ids without a row have been scored. ``effects``: what corrects the logits; None: nothing does.
    ``last_layer``: what the model's last layer was given for the batch scored last, float32 [B, D], if the
    programs say it."""

    last_layer: "torch.Tensor | None" = None

    def __init__(
        self, directory: "str | os.PathLike[str]" = Path(__file__).parent, mapped: bool = False
    ) -> None:
        self.directory, self.mapped = Path(directory), mapped
        self.manifest = verified(self.directory)
        self.difference, self.unknown = 0.0, 0
        with readable(self.directory):
            check_processor(self.manifest["compiled"])
            self.rows = torch.tensor([feature["rows"] for feature in self.manifest["sparse"]])
            self.tables = self.make_tables()
            self.lookups = [self.lookup(found) for found in self.manifest["lookups"]]
            self.maps = self.make_maps()
            # It warns of another instruction set, which check_processor has judged.
            logging.getLogger("torch.export.pt2_archive._package").setLevel(logging.ERROR)
            # Programs with the same file of constants have these once.
            programs = self.manifest["programs"]
            files = {program["constants"] for program in programs} - {None}
            found = {file: tensors(self.directory / file) for file in files}
            constants = {file: {name: v.clone() for name, v in own.items()} for file, own in found.items()}
            self.programs = [Program(self.directory, p, constants.get(p["constants"])) for p in programs]
            self.difference = self.check_golden()
            self.effects = Effects(self) if "effects" in self.manifest else None

    def make_tables(self) -> "Tables":
        """All tables, in memory."""
        return Tables(self.directory, self.manifest["tables"], self.mapped)

    def make_maps(self) -> "dict[int, RowMap]":
        """The maps of features whose ids got rows as they came, by the features' places."""
        made = {
            name: RowMap(**tensors(self.directory / about["file"]))
            for name, about in self.manifest.get("maps", {}).items()
        }
        features = enumerate(self.manifest["sparse"])
        return {place: made[feature["map"]] for place, feature in features if "map" in feature}

    def lookup(self, found: "dict[str, Any]", features: "list[str] | None" = None) -> "Lookup":
        """A lookup by its description in the manifest, whose ids are those of these ``features``; None: of
        all."""
        names = [feature["name"] for feature in self.manifest["sparse"]]
        return Lookup(found, names if features is None else features, self.tables)

    def __call__(
        self,
        dense: torch.Tensor,
        ids: torch.Tensor,
        lengths: torch.Tensor,
        weights: "torch.Tensor | None" = None,
    ) -> torch.Tensor:
        """Scores float32 [B], from dense float32 [B, D], ids int64 [N] and lengths int64 [F * B]; where
        features are weighted (manifest.json), of all ids ``weights`` float32 [N].

        Ids are rows of tables, or keys of 64 bits where they got their rows as they came; they are ordered by
        feature and then by sample, and lengths say how many each has, in the same order. ``ValueError`` for
        wrong shapes and for rows that are not in their table.
        """
        rows, offsets = self.checked(dense, ids, lengths, dense.shape[0]), offsets_of(lengths)
        self.check_weights(ids, weights)
        if self.maps:
            self.unknown += self.unknown_of(rows, lengths)
        with torch.inference_mode():
            calls = [Call(lookup, rows, offsets, len(dense), None, weights) for lookup in self.lookups]
            scores = self.scores(dense, with_lengths(calls, self.pooled(calls)))
            if self.effects is None:
                return scores
            bags = bags_of(ids, rows, lengths.view(-1, len(dense)), weights)
            return self.effects(scores, self.effects.seen(dense, bags))

    def check_weights(self, ids: torch.Tensor, weights: "torch.Tensor | None") -> None:
        """``ValueError`` unless the model takes ``weights`` of these ids as they are."""
        wanted = any(lookup.weighted for lookup in self.lookups)
        if weights is None and wanted:
            raise ValueError("the model's ids have weights: give float32 [N], one for each id")
        if weights is None:
            return
        if weights.dtype != torch.float32 or weights.shape != ids.shape:
            raise ValueError(f"weights is {weights.dtype} {list(weights.shape)}, not float32 [{len(ids)}]")
        if not bool(torch.isfinite(weights).all()):
            raise ValueError("a weight is not a finite number")

    def pooled(self, calls: "list[Call]") -> "list[torch.Tensor]":
        """What the lookups find, float32 [samples, W] each, or a row for each id, float32 [N, D]."""
        return [call.lookup(*call[1:]) for call in calls]

    def scores(self, dense: torch.Tensor, found: "list[torch.Tensor]") -> torch.Tensor:
        """Scores float32 [B], from dense features and what the lookups have found: of each its pooled rows,
        or its rows and then their numbers for each sample."""
        program = self.program_for(dense.shape[0])
        scores = program(dense, found)
        self.last_layer = program.last_layer
        return scores

    def program_for(self, samples: int) -> "Program":
        """The program that scores batches of so many samples."""
        return next(program for program in reversed(self.programs) if program.first <= samples)

    def checked(
        self, dense: torch.Tensor, ids: torch.Tensor, lengths: torch.Tensor, samples: int
    ) -> torch.Tensor:
        """The rows of ``ids``, int64 [N]. ``ValueError`` unless the inputs fit the manifest and each other,
        and features have the numbers of ids that the dense part takes: it does not check them."""
        width, features = len(self.manifest["dense"]["names"]), len(self.rows)
        if dense.dtype != torch.float32 or dense.shape != (samples, width):
            raise ValueError(f"dense is {dense.dtype} {list(dense.shape)}, not float32 [B, {width}]")
        if ids.dtype != torch.int64 or lengths.dtype != torch.int64 or ids.dim() != 1:
            raise ValueError(f"ids and lengths are {ids.dtype} and {lengths.dtype}, not int64 vectors")
        if lengths.shape != (features * samples,):
            raise ValueError(f"lengths is {list(lengths.shape)}, not [{features} features * {samples}]")
        if bool((lengths < 0).any()) or int(lengths.sum()) != len(ids):
            raise ValueError(f"lengths add up to {int(lengths.sum())}, and there are {len(ids)} ids")
        lengths = lengths.view(features, samples)
        rows = self.rows_of(ids, lengths).contiguous()
        limit = self.rows.repeat_interleave(lengths.sum(1))
        wrong = ((rows < 0) | (rows >= limit)).nonzero()
        if len(wrong):
            place = int(wrong[0])
            feature = int((lengths.sum(1).cumsum(0) <= place).sum())
            name = self.manifest["sparse"][feature]["name"]
            raise ValueError(f"id {int(ids[place])} of '{name}' is not in [0, {int(limit[place])})")
        if "sequences" in self.manifest:
            self.check_sequences(lengths)
        return rows

    def rows_of(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """``ids`` with rows in place of keys; ``lengths`` int64 [F * B] or [F, B]."""
        if not self.maps:
            return ids
        parts = list(torch.split(ids, lengths.view(len(self.rows), -1).sum(1).tolist()))
        for place, own in self.maps.items():
            parts[place] = own(parts[place])
        return torch.cat(parts)

    def unknown_of(self, rows: torch.Tensor, lengths: torch.Tensor) -> int:
        """How many of ``rows`` int64 [N] are those of ids without one of their own."""
        parts = torch.split(rows, lengths.view(len(self.rows), -1).sum(1).tolist())
        return sum(int((parts[place] == DEFAULT_ROW).sum()) for place in self.maps)

    def check_sequences(self, lengths: torch.Tensor) -> None:
        """``ValueError`` unless features have the numbers of ids ``lengths`` [F, B] that rows need which are
        not pooled."""
        own = {
            about["name"]: numbers for about, numbers in zip(self.manifest["sparse"], lengths, strict=True)
        }
        for name in self.manifest["sequences"]["single"]:
            if bool((own[name] != 1).any()):
                raise ValueError(f"'{name}' has not one id for each sample, as the model needs")
        for first, *others in self.manifest["sequences"]["aligned"]:
            for name in others:
                if not own[name].equal(own[first]):
                    raise ValueError(f"'{name}' has not as many ids as '{first}' for each sample")

    def golden_scores(self) -> "list[torch.Tensor]":
        """The golden batch's scores here of each program, by one thread: several may add up in another
        order."""
        golden, threads = tensors(self.directory / GOLDEN), torch.get_num_threads()
        dense, ids, lengths = golden["dense"], golden["ids"], golden["lengths"]
        rows, offsets = self.checked(dense, ids, lengths, len(dense)), offsets_of(lengths)
        torch.set_num_threads(1)
        try:
            with torch.inference_mode():
                weights = golden.get("weights")
                self.check_weights(ids, weights)
                calls = [Call(lookup, rows, offsets, len(dense), None, weights) for lookup in self.lookups]
                found = with_lengths(calls, self.pooled(calls))
                return [program(dense, found) for program in self.programs]
        finally:
            torch.set_num_threads(threads)

    def check_golden(self) -> float:
        """The largest difference of the golden batch's scores; ``PackageError`` if it is above the bound."""
        known, worst = tensors(self.directory / GOLDEN), 0.0
        for program, found in zip(self.programs, self.golden_scores(), strict=True):
            wanted, bound = known[program.about["golden"]], program.about["tolerance"]
            if wanted.dtype != found.dtype or wanted.shape != found.shape:
                raise PackageError(f"{self.directory / GOLDEN} has other scores than its samples ask for")
            outputs = len(self.manifest["outputs"])
            if found.reshape(len(found), -1).shape[1] != outputs:
                raise PackageError(f"{self.directory}: its scores are not {outputs} for each sample")
            difference = float((found - wanted).abs().max())
            if not difference <= bound:
                raise PackageError(
                    f"{self.directory}: the golden batch's scores are off by up to {difference:.1e} on this "
                    f"machine ({torch.backends.cpu.get_cpu_capability()}), and {bound:.1e} is allowed: "
                    "compile the package here with 'recpipe package PACKAGE NEW_PACKAGE'"
                )
            worst = max(worst, difference)
        return worst


class Program:
    """The compiled dense part, by what the manifest says ``about`` it, with its ``constants``; None: it has
    them itself. Of several, which differ in precision or kernels, ``first`` is the least number of samples
    that each is used for."""

    def __init__(
        self, directory: Path, about: "dict[str, Any]", constants: "dict[str, torch.Tensor] | None"
    ) -> None:
        self.about, self.first = about, about["from"]
        self.constants: dict[str, torch.Tensor] = {}
        self.last_layer: torch.Tensor | None = None
        try:
            self.run = torch._inductor.aoti_load_package(str(directory / about["file"]))
        except RuntimeError as fault:
            why, space = str(fault).partition("\n")[0], tempfile.gettempdir()
            raise PackageError(
                f"{directory / about['file']}: torch cannot unpack it into {space} and load it; see "
                f"that there is space, or set TMPDIR to another directory ({why})"
            ) from fault
        if constants is not None:
            self.use(constants)

    def use(self, constants: "dict[str, torch.Tensor]") -> None:
        """Take these ``constants`` from the next call on. None may be made meanwhile."""
        # The program refers to them: those before may go once it has the others.
        named = {name: constants[name] for name in self.run.get_constant_fqns()}
        self.run.load_constants(named, check_full_update=False, user_managed=True)
        self.constants = named

    def __call__(self, dense: torch.Tensor, found: "list[torch.Tensor]") -> torch.Tensor:
        """Scores float32 [B]."""
        dense = dense.contiguous()
        if dense.data_ptr() % ALIGNMENT:
            dense = dense.clone()  # MKL rounds differently from other addresses
        # What calling self.run does, without its reading of the arguments' structure, which takes 13 us.
        # It reads a tensor's memory from its beginning on, whatever its strides are.
        scores, *rest = self.run.loader.boxed_run([dense, *(each.contiguous() for each in found)])
        self.last_layer = rest[0] if rest else None
        told: torch.Tensor = scores
        return told


def constants_of(file: Path) -> "set[str]":
    """The names of the constants that a compiled program takes."""
    return set(torch._inductor.aoti_load_package(str(file)).get_constant_fqns())


class RowMap:
    """The rows that ids of 64 bits got as they came: of ``keys`` int64 [n], ascending, ``rows`` int32 [n].
    The key of missing values is among them."""

    def __init__(self, keys: torch.Tensor, rows: torch.Tensor) -> None:
        self.keys, self.rows = keys, rows

    def __call__(self, keys: torch.Tensor) -> torch.Tensor:
        """The row of each of ``keys``, int64; ``DEFAULT_ROW`` for those without one."""
        at = torch.searchsorted(self.keys, keys).clamp_(max=len(self.keys) - 1)
        return torch.where(self.keys[at] == keys, self.rows[at].long(), DEFAULT_ROW)


class Tables:
    """All tables in one buffer uint8, with the byte at which each begins. ``mapped``: see ``Scorer``;
    ``writable``: such a buffer may be written to, which the files do not see: it has copies of the pages that
    are, and the others in common."""

    def __init__(
        self, directory: Path, about: dict[str, Any], mapped: bool = False, writable: bool = False
    ) -> None:
        self.about = about
        if any("file" not in table for table in about.values()):
            raise PackageError(
                f"{directory}: its tables are held by shards, which a server asks: recpipe serve {directory} "
                "shards=HOST:PORT,..."
            )
        found = {name: tensors(directory / table["file"]) for name, table in about.items()}
        self.places = {name: table["places"].clone() for name, table in found.items() if "places" in table}
        self.starts: dict[str, int] = {}
        if mapped:
            files = [directory / table["file"] for table in about.values()]
            self.rows, begins = side_by_side(files, writable)
            for name, begin in zip(about, begins, strict=True):
                self.starts[name] = begin + int(found[name]["rows"].storage_offset())
            return
        end = 0
        for name, table in found.items():
            self.starts[name], end = end, -(-(end + table["rows"].nbytes) // ALIGNMENT) * ALIGNMENT
        self.rows = torch.empty(end, dtype=torch.uint8)
        for name, table in found.items():
            self.rows[self.starts[name] :][: table["rows"].nbytes] = table["rows"].view(-1)


def side_by_side(files: "list[Path]", writable: bool = False) -> "tuple[torch.Tensor, list[int]]":
    """The files' bytes, mapped behind each other into one buffer uint8 that must not be written to unless it
    is ``writable``, and where each begins."""
    begins, end = [], 0
    for file in files:
        begins.append(end)
        end += -(-file.stat().st_size // mmap.PAGESIZE) * mmap.PAGESIZE
    reserved = mmap.mmap(-1, end + mmap.PAGESIZE, flags=mmap.MAP_PRIVATE)  # unmaps all of it in the end
    buffer = torch.frombuffer(reserved, dtype=torch.uint8)
    map_at = ctypes.CDLL(None, use_errno=True).mmap
    map_at.restype, long = ctypes.c_void_p, ctypes.c_size_t
    map_at.argtypes = (ctypes.c_void_p, long, ctypes.c_int, ctypes.c_int, ctypes.c_int, long)
    fixed = 0x10  # MAP_FIXED: in the place of what is mapped there
    for file, begin in zip(files, begins, strict=True):
        place = buffer.data_ptr() + begin
        with file.open("rb") as stream:
            size, how = os.fstat(stream.fileno()).st_size, mmap.MAP_PRIVATE | fixed
            access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
            if map_at(place, size, access, how, stream.fileno(), 0) != place:
                raise OSError(ctypes.get_errno(), f"cannot map {file}")
    return buffer, begins


class Lookup:
    """One lookup, and what FBGEMM's operator asks for."""

    def __init__(self, found: "dict[str, Any]", names: "list[str]", tables: Tables) -> None:
        self.names = names
        self.features = [self.names.index(feature) for feature, _ in found["parts"]]
        own = [table for _, table in found["parts"]]
        types = [tables.about[table]["type"] for table in own]
        dims = [tables.about[table]["dimension"] for table in own]
        widest = {
            t: max((d for d, kind in zip(dims, types, strict=True) if kind == t), default=0) for t in TYPES
        }
        self.before = (
            tables.rows,
            torch.empty(0, dtype=torch.uint8),
            torch.full((len(own),), HOST, dtype=torch.int32),
            torch.tensor([tables.starts[table] for table in own]),
            torch.tensor([TYPES[kind] for kind in types], dtype=torch.uint8),
            torch.tensor([sum(dims[:i]) for i in range(len(dims) + 1)], dtype=torch.int32),
            sum(dims),
            *(widest[kind] for kind in ("int2", "int4", "int8", "fp16", "fp32")),
        )
        mode = {"sum": 0, "mean": 1, "none": 2}[found["pooling"]]
        self.sequence = found["pooling"] == "none"
        """Whether it gives a row for each id of its one feature."""
        self.weighted = bool(found.get("weighted"))
        """Whether rows are multiplied by their ids' weights."""
        # Weights, if there are any, float32 results, no cache, rows without padding, no float8.
        self.after = (mode, None, 0, None, None, 1, 0, -1, -1)
        none = torch.empty(0, dtype=torch.int32)
        places = [tables.places.get(table, none) for table in own]
        self.places = torch.cat(places)
        """For each id its row among those kept, or -1, one table after the other."""
        self.pruned = self.places.numel() > 0
        self.place_starts = torch.tensor([0, *(len(part) for part in places)]).cumsum(0)

    def __call__(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor,
        samples: int,
        where: "torch.Tensor | None" = None,
        weights: "torch.Tensor | None" = None,
    ) -> torch.Tensor:
        """Pooled rows float32 [B, W], or a row for each id float32 [N, D]; see ``Call``."""
        if self.weighted:
            if weights is None or where is not None:
                raise ValueError("a lookup of weighted ids is called without their weights")
            weights, _ = self.arranged(weights, offsets, samples)
            ids, offsets = self.arranged(ids, offsets, samples)
            return self.pooled(self.rows_of(ids, offsets), offsets, weights)
        if where is None:
            ids, offsets = self.arranged(ids, offsets, samples)
            return self.pooled(self.rows_of(ids, offsets), offsets)
        return self.pooled(self.rows_of(ids, offsets)[where])

    def arranged(
        self, ids: torch.Tensor, offsets: torch.Tensor, samples: int
    ) -> "tuple[torch.Tensor, torch.Tensor]":
        """The ids, or their weights, of this lookup's features alone, in its order, and their offsets."""
        if self.features == list(range(len(self.names))):
            return ids, offsets
        bounds = offsets[torch.arange(len(self.names) + 1) * samples].tolist()
        ids = torch.cat([ids[bounds[f] : bounds[f + 1]] for f in self.features])
        lengths = torch.cat([offsets[f * samples : (f + 1) * samples + 1].diff() for f in self.features])
        return ids, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])

    def rows_of(self, ids: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """The row of each id; -1 if it was pruned, which adds nothing. Parts have as many offsets each."""
        if not self.pruned:
            return ids
        rows: torch.Tensor = torch.ops.fbgemm.pruned_array_lookup(
            ids, offsets, self.places, self.place_starts
        )
        return rows

    def pooled(
        self,
        rows: torch.Tensor,
        offsets: "torch.Tensor | None" = None,
        weights: "torch.Tensor | None" = None,
    ) -> torch.Tensor:
        """The sums, or means, of rows of the buffer, or these rows themselves. ``offsets`` None: each bag has
        one row. ``weights`` float32 of the rows: what they are multiplied by."""
        offsets = numbers(len(rows) + 1) if offsets is None else offsets
        lookup = torch.ops.fbgemm.int_nbit_split_embedding_codegen_lookup_function
        mode, _, *after = self.after
        pooled: torch.Tensor = lookup(*self.before, rows, offsets, mode, weights, *after)
        return pooled

    def lengths(self, offsets: torch.Tensor, samples: int) -> torch.Tensor:
        """How many rows of its one feature each sample has, int64 [B]."""
        (feature,) = self.features
        return offsets[feature * samples : (feature + 1) * samples + 1].diff()


class Bags(NamedTuple):
    """What samples have of one feature, one after the other."""

    keys: torch.Tensor
    """The ids as they came, int64 [n]."""
    rows: torch.Tensor
    """Their rows, int64 [n]."""
    lengths: torch.Tensor
    """How many each sample has, int64 [B]."""
    weights: "torch.Tensor | None" = None
    """Of the ids, float32 [n]."""


OfFeatures = Sequence[Bags] | dict[int, Bags]


def bags_of(
    ids: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor, weights: "torch.Tensor | None"
) -> "list[Bags]":
    """The bags of each feature, from what a ``Scorer`` takes, and ``lengths`` [F, B]."""
    counts = lengths.sum(1).tolist()
    given = [None] * len(counts) if weights is None else list(torch.split(weights, counts))
    return list(map(Bags, torch.split(ids, counts), torch.split(rows, counts), lengths, given))


class Effects:
    """What is known of entities, the ids of some features, beside the model: coefficients that were learnt as
    events came. Their products with inputs of a sample are added to its logit."""

    def __init__(self, scorer: Scorer) -> None:
        self.scorer, self.each = scorer, []
        manifest, directory = scorer.manifest, scorer.directory
        self.names = [feature["name"] for feature in manifest["sparse"]]
        self.lookups: dict[str, Lookup] = {}
        self.keys: list[torch.Tensor] = []
        """Of each effect the entity of each row, int64 [rows]; those before the first one's are not read."""
        for about in manifest["effects"]:
            for name in about["inputs"]:
                if name in self.names:
                    found, part = looked_up(manifest, name)
                    self.lookups[name] = scorer.lookup({**found, "parts": [part]}, [name])
            keys = tensors(directory / about["ids"])["records"][:, 0]
            self.keys.append(torch.cat([torch.tensor([MISSING_KEY, MISSING_KEY]), keys]))
            means = tensors(directory / about["file"])["means"]
            place = self.names.index(about["entity"])
            self.each.append((about, place, rows_by_key(self.keys[-1]), means))

    def take(
        self, number: int, rows: torch.Tensor, keys: torch.Tensor, means: torch.Tensor, used: int
    ) -> None:
        """Have ``rows`` int64 [n] of the effect of this ``number`` be of the entities ``keys`` int64 [n],
        with these ``means`` float64 [n, D]; ``used``: how many rows it has from now on. Nothing may be scored
        meanwhile."""
        about, place, _, held = self.each[number]
        after = torch.zeros(used, held.shape[1], dtype=held.dtype)
        entities = torch.full((used,), MISSING_KEY)
        kept = min(used, len(held))
        after[:kept], entities[:kept] = held[:kept], self.keys[number][:kept]
        after[rows], entities[rows] = means, keys
        entities[: DEFAULT_ROW + 1] = MISSING_KEY
        self.keys[number] = entities
        self.each[number] = about, place, rows_by_key(entities), after

    def seen(self, dense: torch.Tensor, bags: "OfFeatures") -> "list[tuple[torch.Tensor, torch.Tensor]]":
        """Of samples, by each effect, the ids int64 [B] of its entities and its inputs float64 [B, D].
        ``bags``: of each of the package's features, by their places. ``ValueError`` for a sample without one
        entity."""
        found = []
        for about, place, _, _ in self.each:
            self.require_single(place, bags[place])
            columns = [self.column(name, dense, bags) for name in about["inputs"]]
            found.append((bags[place].keys, torch.cat(columns, 1).double()))
        return found

    def require_single(self, place: int, own: Bags) -> None:
        """``ValueError`` unless each sample has one id."""
        if bool((own.lengths != 1).any()):
            raise ValueError(f"'{self.names[place]}' has not one id for each sample, as its effect needs")

    def column(self, name: str, dense: torch.Tensor, bags: "OfFeatures") -> torch.Tensor:
        """One input, float32 [B, W]."""
        if name == INTERCEPT:
            return torch.ones(len(dense), 1)
        if name == LAST_LAYER:
            assert self.scorer.last_layer is not None, "the manifest says that programs give it"
            return self.scorer.last_layer
        if name not in self.names:
            place = self.scorer.manifest["dense"]["names"].index(name)
            return dense[:, place : place + 1]
        place = self.names.index(name)
        lookup, own = self.lookups[name], bags[place]
        if lookup.sequence:
            self.require_single(place, own)
        weights = own.weights if lookup.weighted else None
        call = Call(lookup, own.rows, offsets_of(own.lengths), len(dense), None, weights)
        return self.scorer.pooled([call])[0]

    def __call__(self, logits: torch.Tensor, seen: "list[tuple[torch.Tensor, torch.Tensor]]") -> torch.Tensor:
        """The corrected logits float32 [B] of samples that the effects have ``seen``."""
        corrected = logits.double()
        for (_, _, rows, means), (ids, inputs) in zip(self.each, seen, strict=True):
            own, added = means[rows(ids)], torch.zeros(len(ids), dtype=torch.float64)
            for number in range(inputs.shape[1]):  # in this order, for the bits of those who learn
                added += own[:, number] * inputs[:, number]
            corrected = corrected + added
        return corrected.float()


def rows_by_key(keys: torch.Tensor) -> RowMap:
    """The map of the entities of an effect's rows, int64 [rows]."""
    first = DEFAULT_ROW + 1
    own = torch.cat([keys[:1], keys[first:]])
    rows = torch.cat([torch.zeros(1).long(), torch.arange(first, len(keys))])
    order = own.argsort()
    return RowMap(own[order], rows[order])


def looked_up(manifest: "dict[str, Any]", feature: str) -> "tuple[dict[str, Any], list[str]]":
    """The last of the model's lookups of a feature, and the part of it that is the feature's."""
    return next(
        (lookup, part)
        for lookup in reversed(manifest["lookups"])
        for part in lookup["parts"]
        if part[0] == feature
    )


class Call(NamedTuple):
    """A lookup for so many samples: ``ids`` int64 [N] and ``offsets`` int64, as ``Scorer`` takes them.

    ``where`` int64 [P * samples], for a lookup of P features: each sample has one id of each, and this is its
    place among ``ids``, so that what samples share is there once. ``ids`` are in the lookup's order then, and
    ``offsets`` [P + 1] say where each feature's begin.
    """

    lookup: Lookup
    ids: torch.Tensor
    offsets: torch.Tensor
    samples: int
    where: "torch.Tensor | None" = None
    weights: "torch.Tensor | None" = None
    """Of the ids, float32 [N], for lookups that are weighted; then there is no ``where``."""


def with_lengths(calls: "list[Call]", found: "list[torch.Tensor]") -> "list[torch.Tensor]":
    """What the lookups have ``found``, where rows are not pooled with their numbers for each sample."""
    inputs = []
    for call, rows in zip(calls, found, strict=True):
        inputs.append(rows)
        if call.lookup.sequence and call.where is None:
            inputs.append(call.lookup.lengths(call.offsets, call.samples))
        elif call.lookup.sequence:
            inputs.append(torch.ones(call.samples, dtype=torch.int64))
    return inputs


def offsets_of(lengths: torch.Tensor) -> torch.Tensor:
    """Where each bag begins, and where the last one ends: int64 [len(lengths) + 1]."""
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


@lru_cache(64)
def numbers(count: int) -> torch.Tensor:
    """0, 1, ..., int64 [count]; not to be written to."""
    return torch.arange(count)


def verified(directory: Path) -> dict[str, Any]:
    """The manifest; ``PackageError`` names the first file that is missing, not as it was written, or not in
    the manifest, and what in the manifest does not fit the files."""
    manifest = sealed(directory)
    with readable(directory):
        check_files(directory, manifest["files"])
        check_tables(directory, manifest)
        check_maps(directory, manifest)
        check_effects(directory, manifest)
        check_programs(directory, manifest)
    return manifest


@contextmanager
def readable(directory: Path) -> "Iterator[None]":
    """In the block, whatever goes wrong because the package ``directory`` is not as ``recpipe package``
    writes it is a ``PackageError``."""
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as fault:
        why = (str(fault).splitlines() or [""])[0][:200]
        raise PackageError(
            f"{directory}: {MANIFEST} and the files are not as 'recpipe package' writes them "
            f"({type(fault).__name__}: {why}): package the checkpoint anew"
        ) from fault


def sealed(directory: Path) -> dict[str, Any]:
    """The manifest, whose digest is right; nothing in it has been checked yet."""
    file, digest = directory / MANIFEST, directory / DIGEST
    for part in (digest, file):
        if part.is_symlink() or not part.is_file():
            raise PackageError(
                f"{part} is missing: {directory} is no whole package; make one with "
                "'recpipe package CHECKPOINT DIRECTORY'"
            )
    if file.stat().st_size > MOST_BYTES:
        raise PackageError(f"{file} is larger than {MOST_BYTES >> 20} MiB")
    text = file.read_bytes()
    told = f"{hashlib.sha256(text).hexdigest()}  {MANIFEST}\n".encode()
    if digest.stat().st_size != len(told) or digest.read_bytes() != told:
        raise PackageError(f"{file} is not as it was written ({DIGEST})")
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise PackageError(f"{file} is no JSON text that can be read ({type(fault).__name__})") from fault
    schema = manifest.get("schema") if isinstance(manifest, dict) else None
    if schema not in (SCHEMA, WITH_MAPS, WITH_EFFECTS, WITH_SHARDS):
        raise PackageError(
            f"{directory} is a package of schema {str(schema)[:20]}, and this loader reads {SCHEMA} to "
            f"{WITH_SHARDS}: package the checkpoint anew"
        )
    found: dict[str, Any] = manifest
    return found


def check_files(
    directory: Path, files: "dict[str, str]", own: "tuple[str, ...]" = (MANIFEST, DIGEST, SIGNATURE)
) -> None:
    """``PackageError`` unless the package holds exactly these files, with these digests, and no links beside
    its ``own``, of which the first is the manifest."""
    known = {*files, *own}
    outside = next((name for name in files if name.startswith("/") or ".." in name.split("/")), None)
    if outside is not None:
        raise PackageError(f"{directory / own[0]} names {outside[:80]!r}, which is not in the package")
    for folder, folders, names in os.walk(directory):
        for file in (Path(folder, name) for name in (*folders, *names)):
            name = file.relative_to(directory).as_posix()
            if file.is_symlink() or not (file.is_file() or file.is_dir()):
                raise PackageError(f"{file} is a link or no file at all: put the file itself there")
            # Python writes the latter where score.py is imported from the package.
            if file.is_file() and name not in known and not fnmatchcase(name, "__pycache__/score.*.pyc"):
                raise PackageError(f"{file} is not in {own[0]}: remove it, or package the checkpoint anew")
    for name, digest in files.items():
        file = directory / name
        if not file.is_file():
            raise PackageError(f"{file} is missing: package the checkpoint anew")
        with file.open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
                raise PackageError(f"{file} is not as it was written (sha256): package the checkpoint anew")


def check_tables(directory: Path, manifest: dict[str, Any]) -> None:
    """``PackageError`` if lookups would read what is not there: the operators do not check."""
    tables, features = manifest["tables"], {about["name"]: about["rows"] for about in manifest["sparse"]}
    for name, table in tables.items():
        if "file" not in table and manifest["schema"] == WITH_SHARDS:
            continue  # the shards that hold its rows check them
        found = tensors(member(directory, manifest, table["file"]))
        rows, places = found["rows"], found.get("places")
        fits = rows.dtype == torch.uint8 and table["dimension"] > 0
        fits = fits and list(rows.shape[1:]) == [row_bytes(table)]
        if places is None:
            fits = fits and len(rows) == table["rows"]
        else:
            fits = fits and places.dtype == torch.int32 and list(places.shape) == [table["rows"]]
            fits = fits and int(places.min()) >= -1 and int(places.max()) < len(rows)
        if not fits:
            raise PackageError(f"{directory / table['file']} has other rows than {MANIFEST} says of '{name}'")
    for lookup in manifest["lookups"]:
        for feature, table in lookup["parts"]:
            if not 0 < features[feature] <= tables[table]["rows"]:
                raise PackageError(
                    f"{directory / MANIFEST}: ids of '{feature}' go up to {features[feature]}, and its table "
                    f"has {tables[table]['rows']} rows"
                )


def row_bytes(table: "dict[str, Any]") -> int:
    """Bytes of a row of a table, by what the manifest says of it."""
    bits: int = BITS[table["type"]]
    return int(table["dimension"]) * bits // 8 + (SCALE_BYTES if bits <= 8 else 0)


def check_maps(directory: Path, manifest: dict[str, Any]) -> None:
    """``PackageError`` if a map gives rows that are not in the tables, or could not be searched."""
    for name, about in manifest.get("maps", {}).items():
        found = tensors(member(directory, manifest, about["file"]))
        keys, rows = found["keys"], found["rows"]
        most = min(feature["rows"] for feature in manifest["sparse"] if feature.get("map") == name)
        fits = keys.dtype == torch.int64 and rows.dtype == torch.int32
        fits = fits and keys.shape == rows.shape == (about["ids"] + 1,)
        fits = fits and int(keys[0]) == MISSING_KEY and int(rows[0]) == 0
        fits = fits and bool((keys[1:] > keys[:-1]).all())
        if not fits or (len(rows) > 1 and not DEFAULT_ROW < int(rows[1:].min()) <= int(rows.max()) < most):
            raise PackageError(f"{directory / about['file']} has other ids than {MANIFEST} says of '{name}'")


def check_effects(directory: Path, manifest: dict[str, Any]) -> None:
    """``PackageError`` if effects could not be given their inputs, or have other coefficients than these."""
    effects = manifest.get("effects", [])
    if effects and [output["kind"] for output in manifest["outputs"]] != ["clicks"]:
        raise PackageError(f"{directory}: effects correct one logit of clicks, which the model does not give")
    features, dense = [feature["name"] for feature in manifest["sparse"]], manifest["dense"]["names"]
    for about in effects:
        entity, width = about["entity"], 0
        for name in about["inputs"]:
            if name == LAST_LAYER:
                if LAST_LAYER not in manifest:
                    raise PackageError(
                        f"{directory}: the effect of '{entity}' takes {LAST_LAYER}, which the compiled model "
                        "does not give: package the checkpoint with effects=RUN"
                    )
                width += manifest[LAST_LAYER]
            elif name in features:
                _, (_, table) = looked_up(manifest, name)
                width += manifest["tables"][table]["dimension"]
            elif name in dense or name == INTERCEPT:
                width += 1
            else:
                raise PackageError(
                    f"{directory}: the effect of '{entity}' takes {name!r}, which is no column"
                )
        records = tensors(member(directory, manifest, about["ids"]))["records"]
        means = tensors(member(directory, manifest, about["file"]))["means"]
        fits = entity in features and width == about["width"]
        fits = fits and records.dtype == torch.int64 and list(records.shape[1:]) == [2]
        fits = fits and bool((records[:, 0].sort().values.diff() != 0).all())
        fits = fits and means.dtype == torch.float64
        if not fits or list(means.shape) != [len(records) + DEFAULT_ROW + 1, width]:
            raise PackageError(f"{directory / about['file']} has not the coefficients of '{entity}'")


def check_programs(directory: Path, manifest: dict[str, Any]) -> None:
    """``PackageError`` unless there is a program for every number of samples, with what it needs, and golden
    scores that are to be met."""
    golden = tensors(member(directory, manifest, GOLDEN))
    programs, exported = manifest["programs"], manifest["golden"]["programs"]
    for about in (*programs, *exported):
        member(directory, manifest, about["file"])
        if about.get("constants") is not None:
            tensors(member(directory, manifest, about["constants"]))
        bound, most = about["tolerance"], LOOSEST * max(1.0, float(golden[about["golden"]].abs().max()))
        # The bound was taken from scores that the exported program rounds otherwise.
        if not 0 <= bound <= 1.001 * most:
            raise PackageError(
                f"{directory / MANIFEST} allows golden scores to be off by {bound}, and {most:.1e} is the "
                "most: package the checkpoint anew"
            )
    if "popularity" in manifest:
        tensors(member(directory, manifest, manifest["popularity"]["file"]))
    starts = [about["from"] for about in programs]
    if not exported or not starts or starts != sorted({0, *starts}):
        raise PackageError(f"{directory / MANIFEST} has no program for every number of samples")


def member(directory: Path, manifest: dict[str, Any], name: str) -> Path:
    """The file that the manifest uses by this name; ``PackageError`` if it does not list it."""
    if name not in manifest["files"]:
        raise PackageError(f"{directory / MANIFEST} uses {name[:80]!r}, which is not among its files")
    return directory / name


def check_processor(compiled: dict[str, Any]) -> None:
    """``PackageError`` if this processor lacks instructions that the compiled code uses."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    lacking = sorted(set(compiled["cpu_flags"]) - set(flags))
    if platform.machine() != compiled["machine"] or lacking:
        what = f"{platform.machine()}, without {', '.join(lacking) or 'its instructions'}"
        raise PackageError(
            f"the package was compiled for {compiled['machine']} with {compiled['instruction_set']}, and "
            f"this machine is {what}: compile it here with 'recpipe package PACKAGE NEW_PACKAGE'"
        )


def tensors(file: Path) -> "dict[str, torch.Tensor]":
    """The tensors in a safetensors file, mapped into memory; ``PackageError`` if it is none."""
    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}
    kinds |= {"I64": torch.int64, "I32": torch.int32, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
    try:
        data = torch.from_file(str(file), size=file.stat().st_size, dtype=torch.uint8)
        start = 8 + int.from_bytes(bytes(data[:8].tolist()), "little")
        if start > len(data):
            raise ValueError("its header is cut")
        found = json.loads(bytes(data[8:start].tolist()))
        found.pop("__metadata__", None)
        made = {}
        for name, about in found.items():
            low, high = about["data_offsets"]
            if not 0 <= low <= high <= len(data) - start:
                raise ValueError(f"'{name}' is cut")
            made[name] = data[start + low : start + high].view(kinds[about["dtype"]]).view(about["shape"])
        return made
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError, RuntimeError) as fault:
        why = (str(fault).splitlines() or [""])[0][:100]
        raise PackageError(f"{file} is no whole safetensors file ({why})") from fault


if __name__ == "__main__":
    scorer = Scorer(sys.argv[1] if sys.argv[1:] else Path(__file__).parent)
    print(f"{scorer.directory}: whole; golden scores differ by {scorer.difference:.1e}")
