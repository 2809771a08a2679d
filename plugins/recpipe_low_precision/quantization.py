"""One quantization: what is searched on the calibration slice, written, and judged on the test slice."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from recpipe.common.meter import Meter
from recpipe.errors import UserError
from recpipe.model.call import Called
from recpipe.model.metrics import auc
from recpipe_low_precision import lookups, report
from recpipe_low_precision.bootstrap import PairedBootstrap
from recpipe_low_precision.checkpoint import write_quantized
from recpipe_low_precision.debugger import compare
from recpipe_low_precision.dense import Linear, calibrate, largest_code, measure, types_for
from recpipe_low_precision.judge import Judge
from recpipe_low_precision.manifest import table_bytes
from recpipe_low_precision.model_quantizer import FinishedModel, Quantized
from recpipe_low_precision.opened import put_rows_of
from recpipe_low_precision.row_types import FLOAT, Assignment, Choice, fits
from recpipe_low_precision.search import Cost, Found, Search
from recpipe_low_precision.slices import Slice, asked_in, between_samples, check_slice, used_rows

if TYPE_CHECKING:
    from recpipe_low_precision.plugin import LowPrecision

log = logging.getLogger("recpipe")
JOURNAL = "evaluations.jsonl"


class Quantization:
    """Makes the ``finished`` model smaller by the ``knobs`` of the plugin; ``run`` says how."""

    def __init__(self, knobs: LowPrecision, finished: FinishedModel) -> None:
        self.knobs, self.finished, self.source = knobs, finished, finished.source
        self.used: dict[str, NDArray[np.bool_]] = {}
        """Which rows of each table training looked up, if others are pruned."""
        self.live: dict[str, int] = {}
        """How many they are."""
        self.layer_types = types_for(knobs.dense)
        self.most = largest_code(knobs.reduce_range)
        """The largest code of an int8 layer's input."""
        self.choices = [Choice(kind) for kind in knobs.kinds]
        if knobs.prune:
            self.choices += [Choice(kind, True) for kind in (FLOAT.kind, *knobs.kinds)]

    def run(self) -> Quantized:
        """Search types for tables and then for layers, write the checkpoint, and judge it as it was written;
        returns the report."""
        knobs, finished, dataset = self.knobs, self.finished, self.finished.dataset
        samples = dataset.size("eval")
        first = round(samples * knobs.calibration)
        if not 0 < first < samples:
            raise UserError(f"there are {samples} held-out samples: raise data.eval_fraction")
        if knobs.prune:
            batches = dataset.num_batches("train", finished.batch_size)
            with Meter() as meter:
                train = dataset.batches("train", finished.batch_size)
                self.used = used_rows(self.source, train, batches, meter)
            self.live = {table: int(used.sum()) for table, used in self.used.items()}
        log.info("reading the %s calibration samples' rows", f"{first:,}")
        calibration = Slice(self.source, self._held_out(0, first), knobs.cache_bytes, self.used)
        log.info("checking the test slice")  # now: a search takes minutes
        check_slice(self.source, self._held_out(first, samples))
        journal = finished.output / JOURNAL
        judge = Judge(calibration, self._tables_bytes, journal, self._work(), knobs.evaluations)
        cost, may = self._aim(calibration)
        tables = self._searched(
            judge, lambda meter: Search(judge, self.choices, cost, may, knobs.bound, meter)
        )
        layers = self._layers(calibration, tables.assignment)
        dense = Found({}, None, [])
        if layers:
            dense = self._searched(judge, lambda meter: self._layers_search(judge, layers, tables, meter))
        log.info("writing it")
        write_quantized(
            finished.quantized,
            self.source,
            {table: choice.kind for table, choice in tables.assignment.items()},
            {table: self.used[table] for table, choice in tables.assignment.items() if choice.pruned},
            self._settings(),
            {
                layers[name].path: layers[name].kept(choice.kind)
                for name, choice in dense.assignment.items()
                if choice != FLOAT
            },
        )
        log.info("judging it on the %s samples of the test slice", f"{samples - first:,}")
        test = Slice(self.source, self._held_out(first, samples), knobs.cache_bytes, self.used)
        made = self.source.called()
        put_rows_of(made, finished.quantized, asked_in(calibration, test))
        content = report.content(
            self._described(tables.assignment),
            self._quality(test, made),
            self._speed(calibration, tables.assignment),
            compare(calibration, made),
            tables,
            judge.done,
            self._settings(),
        )
        content["dense"] = report.dense_content(layers, dense, knobs.layer_error)
        return report.written(content)

    def _held_out(self, low: int, high: int) -> Iterator[Any]:
        """Batches of held-out samples ``low`` to ``high``."""
        return between_samples(self.finished.dataset.batches("eval", self.finished.batch_size), low, high)

    def _work(self) -> str:
        """Identifies checkpoint, data and slice, for evaluations of an interrupted run."""
        told = {
            "checkpoint": (self.source.directory / "MANIFEST.json").read_text(),
            "data": self.finished.dataset.fingerprint,
            "batch_size": self.finished.batch_size,
            "calibration": self.knobs.calibration,
            "prune": self.knobs.prune,
            "most": self.most,
        }
        return hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest()

    def _searched(self, judge: Judge, made: Callable[[Meter], Search]) -> Found:
        """What a search finds; if it is interrupted, how it goes on is said."""
        with Meter() as meter:
            try:
                return made(meter).run()
            except KeyboardInterrupt:
                log.info(
                    "interrupted after %d evaluations, which are kept: the same command with hydra.run.dir=%s"
                    " goes on from there",
                    len(judge.done),
                    judge.journal.parent,
                )
                raise

    def _aim(self, calibration: Slice) -> tuple[Cost, Callable[[str, Choice], bool]]:
        """What the search makes small, and which choices a table may have."""

        def fit(table: str, choice: Choice) -> bool:
            return fits(choice.kind, self.source.shapes[table][1])

        if self.knobs.minimise == "bytes":
            return self._table_bytes, fit
        log.info("measuring lookups of each table in each type")
        rounds = lookups.rounds_of(calibration, [FLOAT, *self.choices], fit)
        if self.knobs.minimise == "time":
            return partial(lookups.seconds, rounds), fit
        return (
            self._table_bytes,
            lambda table, choice: fit(table, choice) and not lookups.is_slower(rounds, table, choice),
        )

    def _layers(self, calibration: Slice, tables: Assignment) -> dict[str, Linear]:
        """The linear layers with ranges, errors and, where they decide, times."""
        if not self.layer_types:
            return {}
        if calibration.called.low_precision:
            log.info("the dense part stays as it is: the model is computed in bfloat16")
            return {}
        layers = calibrate(calibration, tables, self.layer_types, self.most)
        if self.knobs.dense == "auto":
            log.info("measuring %d linear layers", len(layers))
            measure(layers, self.layer_types)
        return layers

    def _layers_search(
        self, judge: Judge, layers: Mapping[str, Linear], tables: Found, meter: Meter
    ) -> Search:
        return Search(
            judge,
            [Choice(kind) for kind in self.layer_types],
            lambda name, choice: layers[name].cost(choice),
            lambda name, choice: layers[name].fits(choice, self.knobs.layer_error),
            self.knobs.model_bound,
            meter,
            list(layers),
            tables.assignment,
        )

    def _table_bytes(self, table: str, choice: Choice) -> int:
        kept = self.live[table] if choice.pruned else None
        return table_bytes(choice.kind, *self.source.shapes[table], kept)

    def _tables_bytes(self, assignment: Assignment) -> int:
        return sum(self._table_bytes(table, assignment[table]) for table in self.source.shapes)

    def _quality(self, test: Slice, quantized: Called) -> dict[str, Any]:
        """Figures of the test slice: the model as it was written and opened again, against float32."""
        base = test.evaluate(dict.fromkeys(test.tables, FLOAT))
        made = test.evaluate_called(quantized)
        bootstrap = PairedBootstrap(len(base.losses))
        return {
            "samples": len(base.losses),
            **{
                name: {
                    "ne": float(found.losses.mean()) / test.base_entropy,
                    "auc": auc(test.labels, found.logits.astype(np.float32)),
                }
                for name, found in (("float32", base), ("quantized", made))
            },
            "ne_difference": asdict(bootstrap.relative(made.losses, base.losses)),
            "auc_difference": asdict(bootstrap.auc(test.labels, made.logits, base.logits)),
        }

    def _speed(self, calibration: Slice, assignment: Assignment) -> dict[str, Any]:
        """Lookups of all tables together, and of each that is not float32, over float32 rows."""
        low = [choice for choice in dict.fromkeys(assignment.values()) if choice != FLOAT]
        rounds = lookups.rounds_of(
            calibration, [FLOAT, *low], lambda table, choice: choice in (FLOAT, assignment[table])
        )
        by_table = {t: lookups.ratios(rounds, t, choice) for t, choice in assignment.items()}
        return {
            **asdict(lookups.compare(calibration, assignment)),
            "tables": {
                table: {"ratio": median(own), "least": min(own), "most": max(own)}
                for table, own in by_table.items()
                if assignment[table] != FLOAT
            },
        }

    def _described(self, assignment: Assignment) -> dict[str, dict[str, Any]]:
        return {
            table: {
                "type": str(choice),
                "rows": self.source.shapes[table][0],
                "dim": self.source.shapes[table][1],
                "kept": self.live[table] if choice.pruned else None,
                "bytes": self._table_bytes(table, choice),
                "float32_bytes": self._table_bytes(table, FLOAT),
            }
            for table, choice in assignment.items()
        }

    def _settings(self) -> dict[str, Any]:
        names = ("minimise", "bound", "dense", "model_bound", "layer_error")
        return {
            "checkpoint": str(self.source.directory),
            "types": self.knobs.kinds,
            **{name: getattr(self.knobs, name) for name in names},
            "input_codes": self.most + 1,
            "calibration": self.knobs.calibration,
            "prune": self.knobs.prune,
        }
