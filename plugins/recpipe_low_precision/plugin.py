"""Low precision for a finished model: ``recpipe quantize CHECKPOINT +plugin=low_precision``."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Annotated, Any

import numpy as np
from annotated_types import Gt, Interval
from numpy.typing import NDArray

from recpipe.kit import Meter
from recpipe.model.call import Called
from recpipe.model.metrics import auc
from recpipe.plugin import Context, Contribution, Plugin, PluginError, UserError
from recpipe_low_precision import lookups, report
from recpipe_low_precision.bootstrap import PairedBootstrap
from recpipe_low_precision.checkpoint import write_quantized
from recpipe_low_precision.debugger import compare
from recpipe_low_precision.dense import TYPES, Linear, calibrate, largest_code, measure, types_for
from recpipe_low_precision.dense_report import dense_content
from recpipe_low_precision.judge import Judge
from recpipe_low_precision.manifest import table_bytes
from recpipe_low_precision.model_quantizer import FinishedModel, ModelQuantizer, Quantized
from recpipe_low_precision.opened import put_rows_of
from recpipe_low_precision.row_types import FLOAT, ROW_TYPES, Assignment, Choice, fits
from recpipe_low_precision.search import Cost, Found, Search
from recpipe_low_precision.slices import Slice, asked_in, between_samples, check_slice, used_rows

log = logging.getLogger("recpipe")
JOURNAL = "evaluations.jsonl"
Share = Annotated[float, Interval(gt=0, lt=1)]


class LowPrecision(Plugin, ModelQuantizer):
    """Types for a finished model's tables and layers under a bound on the loss of NE (2021)."""

    api = (2, 3)

    def __init__(
        self,
        *,
        types: list[str],
        minimise: str,
        bound: Annotated[float, Interval(ge=0)],
        dense: str,
        model_bound: Annotated[float, Interval(ge=0)],
        layer_error: Annotated[float, Interval(ge=0)],
        reduce_range: bool | None,
        calibration: Share,
        evaluations: Annotated[int, Gt(0)],
        cache_bytes: Annotated[int, Gt(0)],
        prune: bool,
    ) -> None:
        unknown = next((kind for kind in types if kind not in ROW_TYPES), None)
        if unknown is not None or not types:
            raise _wrong("types", unknown, f"choose among {', '.join(ROW_TYPES[1:])}")
        if minimise not in ("bytes", "time", "auto"):
            raise _wrong("minimise", minimise, "choose bytes, time or auto")
        if minimise == "time" and prune:
            raise _wrong("prune", prune, "it saves bytes, not time: leave it out with minimise=time")
        if dense not in ("auto", "float32", *TYPES):
            raise _wrong("dense", dense, f"choose auto, float32, {' or '.join(TYPES)}")
        self.dense, self.model_bound, self.layer_error = dense, model_bound, layer_error
        self.reduce_range = reduce_range
        self.kinds = [kind for kind in ROW_TYPES if kind in types and kind != FLOAT.kind]
        self.minimise, self.bound, self.calibration = minimise, bound, calibration
        self.evaluations, self.cache_bytes, self.prune = evaluations, cache_bytes, prune

    def contribute(self, ctx: Context) -> Contribution:
        """It has no part in training."""
        raise PluginError(
            "plugin 'low_precision' works on a finished model: recpipe quantize CHECKPOINT "
            "+plugin=low_precision"
        )

    def quantize(self, finished: FinishedModel) -> Quantized:
        """Search, write the checkpoint, and judge it on the test slice."""
        return Work(self, finished).done()


def _wrong(knob: str, value: object, remedy: str) -> PluginError:
    return PluginError(f"plugins.low_precision.{knob}={value}: {remedy}")


class Work:
    """One quantization by the ``knobs`` of the plugin."""

    def __init__(self, knobs: LowPrecision, finished: FinishedModel) -> None:
        self.knobs, self.finished, self.source = knobs, finished, finished.source
        self.used: dict[str, NDArray[np.bool_]] = {}
        self.live: dict[str, int] = {}
        """How many rows of each table training looked up."""
        self.layer_types = types_for(knobs.dense)
        self.most = largest_code(knobs.reduce_range)

    def done(self) -> Quantized:
        """Quantize; returns the report."""
        finished, dataset = self.finished, self.finished.dataset
        samples = dataset.size("eval")
        first = round(samples * self.knobs.calibration)
        if not 0 < first < samples:
            raise UserError(f"there are {samples} held-out samples: raise data.eval_fraction")
        if self.knobs.prune:
            batches = dataset.num_batches("train", finished.batch_size)
            with Meter() as meter:
                train = dataset.batches("train", finished.batch_size)
                self.used = used_rows(self.source, train, batches, meter)
            self.live = {table: int(used.sum()) for table, used in self.used.items()}
        log.info("reading the %s calibration samples' rows", f"{first:,}")
        calibration = Slice(self.source, self._part(0, first), self.knobs.cache_bytes, self.used)
        log.info("checking the test slice")  # now: a search takes minutes
        check_slice(self.source, self._part(first, samples))
        judge = Judge(
            calibration, self._bytes, finished.output / JOURNAL, self._work(), self.knobs.evaluations
        )
        found = self._searched(judge, lambda meter: self._tables_search(judge, meter))
        layers = self._layers(calibration, found.assignment)
        dense = Found({}, None, [])
        if layers:
            dense = self._searched(judge, lambda meter: self._layers_search(judge, layers, found, meter))
        log.info("writing it")
        self._write(found.assignment, layers, dense.assignment)
        log.info("judging it on the %s samples of the test slice", f"{samples - first:,}")
        test = Slice(self.source, self._part(first, samples), self.knobs.cache_bytes, self.used)
        made = self.source.called()
        put_rows_of(made, finished.quantized, asked_in(calibration, test))
        numerics = compare(calibration, made)
        quality = self._quality(test, made)
        speed = self._speed(calibration, found.assignment)
        tables = self._tables(found.assignment)
        content = report.content(tables, quality, speed, numerics, found, judge.done, self._settings())
        content["dense"] = dense_content(layers, dense, self.knobs)
        return report.written(content)

    def _part(self, low: int, high: int) -> Iterator[Any]:
        """Batches of held-out samples ``low`` to ``high``."""
        return between_samples(self.finished.dataset.batches("eval", self.finished.batch_size), low, high)

    def _choices(self) -> list[Choice]:
        whole = [Choice(kind) for kind in self.knobs.kinds]
        if not self.knobs.prune:
            return whole
        return [*whole, *(Choice(kind, True) for kind in (FLOAT.kind, *self.knobs.kinds))]

    def _searched(self, judge: Judge, made: Callable[[Meter], Search]) -> Found:
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

    def _tables_search(self, judge: Judge, meter: Meter) -> Search:
        cost, may = self._aim(judge.slice)
        return Search(judge, self._choices(), cost, may, self.knobs.bound, meter)

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

    def _aim(self, calibration: Slice) -> tuple[Cost, Callable[[str, Choice], bool]]:
        """What the search makes small, and which choices a table may have."""
        if self.knobs.minimise == "bytes":
            return self._table_bytes, self._may
        log.info("measuring lookups of each table in each type")
        rounds = lookups.rounds_of(calibration, [FLOAT, *self._choices()], self._may)
        if self.knobs.minimise == "time":
            return partial(lookups.seconds, rounds), self._may

        def may(table: str, choice: Choice) -> bool:
            return self._may(table, choice) and not lookups.is_slower(rounds, table, choice)

        return self._table_bytes, may

    def _may(self, table: str, choice: Choice) -> bool:
        return fits(choice.kind, self.source.shapes[table][1])

    def _table_bytes(self, table: str, choice: Choice) -> int:
        kept = self.live[table] if choice.pruned else None
        return table_bytes(choice.kind, *self.source.shapes[table], kept)

    def _bytes(self, assignment: Assignment) -> int:
        """Of the tables."""
        return sum(self._table_bytes(table, assignment[table]) for table in self.source.shapes)

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

    def _write(self, assignment: Assignment, linears: Mapping[str, Linear], chosen: Assignment) -> None:
        kinds = {table: choice.kind for table, choice in assignment.items()}
        kept = {table: self.used[table] for table, choice in assignment.items() if choice.pruned}
        layers = {
            linears[name].path: linears[name].kept(choice.kind)
            for name, choice in chosen.items()
            if choice != FLOAT
        }
        write_quantized(self.finished.quantized, self.source, kinds, kept, self._settings(), layers)

    def _quality(self, test: Slice, quantized: Called) -> dict[str, Any]:
        """Figures of the test slice: the model as it was written and opened again, against float32."""
        base = test.evaluate(dict.fromkeys(test.tables, FLOAT))
        made = test.evaluate_called(quantized)
        bootstrap = PairedBootstrap(len(base.losses))
        return {
            "samples": len(base.losses),
            "float32": {
                "ne": float(base.losses.mean()) / test.base_entropy,
                "auc": auc(test.labels, base.logits.astype(np.float32)),
            },
            "quantized": {
                "ne": float(made.losses.mean()) / test.base_entropy,
                "auc": auc(test.labels, made.logits.astype(np.float32)),
            },
            "ne_difference": asdict(bootstrap.relative(made.losses, base.losses)),
            "auc_difference": asdict(bootstrap.auc(test.labels, made.logits, base.logits)),
        }

    def _speed(self, calibration: Slice, assignment: Assignment) -> dict[str, Any]:
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

    def _tables(self, assignment: Assignment) -> dict[str, dict[str, Any]]:
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
        return {
            "checkpoint": str(self.source.directory),
            "types": self.knobs.kinds,
            "minimise": self.knobs.minimise,
            "bound": self.knobs.bound,
            "dense": self.knobs.dense,
            "model_bound": self.knobs.model_bound,
            "layer_error": self.knobs.layer_error,
            "input_codes": self.most + 1,
            "calibration": self.knobs.calibration,
            "prune": self.knobs.prune,
        }
