"""Low precision for a finished model: ``recpipe quantize CHECKPOINT +plugin=low_precision``."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from statistics import median
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Gt, Interval
from numpy.typing import NDArray

from recpipe.answers.row_types import ROW_TYPES, fits
from recpipe.common.meter import Meter
from recpipe.errors import UserError
from recpipe.model.call import Called
from recpipe.model.metrics import auc
from recpipe.plugin import Context, Contribution, Plugin, PluginError
from recpipe_low_precision import lookups, report
from recpipe_low_precision.checkpoint import table_bytes, write_quantized
from recpipe_low_precision.debugger import compare
from recpipe_low_precision.dense import TYPES, Linear, calibrate, largest_code, measure, types_for
from recpipe_low_precision.model_quantizer import FinishedModel, ModelQuantizer, Quantized
from recpipe_low_precision.opened import put_rows_of
from recpipe_low_precision.row_types import FLOAT, Assignment, Choice
from recpipe_low_precision.search import Cost, Found, Judge, PairedBootstrap, Search
from recpipe_low_precision.slices import Losses, Slice, asked_in, between_samples, check_slice, used_rows

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
        return Quantization(self, finished).run()


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
        judge = Judge(
            calibration,
            lambda chosen: sum(self._table_bytes(table, chosen[table]) for table in self.source.shapes),
            finished.output / JOURNAL,
            self._work(),
            knobs.evaluations,
        )
        tables = Search(judge, self.choices, *self._aim(calibration), knobs.bound).run()
        layers = self._layers(calibration, tables.assignment)
        dense = Found({}, None, [])
        if layers:
            dense = Search(
                judge,
                [Choice(kind) for kind in self.layer_types],
                lambda name, choice: layers[name].cost(choice),
                lambda name, choice: layers[name].fits(choice, knobs.layer_error),
                knobs.model_bound,
                list(layers),
                tables.assignment,
            ).run()
        log.info("writing it")
        write_quantized(
            finished.quantized,
            self.source,
            {table: choice.kind for table, choice in tables.assignment.items()},
            {table: self.used[table] for table, choice in tables.assignment.items() if choice.pruned},
            self._settings(),
            {
                layers[name].path: (
                    layers[name].low.layers[choice.kind],
                    layers[name].low.scales if choice.kind == "int8" else None,
                )
                for name, choice in dense.assignment.items()
                if choice != FLOAT
            },
        )
        log.info("judging it on the %s samples of the test slice", f"{samples - first:,}")
        test = Slice(self.source, self._held_out(first, samples), knobs.cache_bytes, self.used)
        made = self.source.called()
        put_rows_of(made, finished.quantized, asked_in(calibration, test))
        described = {
            table: {
                "type": str(choice),
                "rows": self.source.shapes[table][0],
                "dim": self.source.shapes[table][1],
                "kept": self.live[table] if choice.pruned else None,
                "bytes": self._table_bytes(table, choice),
                "float32_bytes": self._table_bytes(table, FLOAT),
            }
            for table, choice in tables.assignment.items()
        }
        content = report.content(
            described,
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

    def _table_bytes(self, table: str, choice: Choice) -> int:
        kept = self.live[table] if choice.pruned else None
        return table_bytes(choice.kind, *self.source.shapes[table], kept)

    def _quality(self, test: Slice, quantized: Called) -> dict[str, Any]:
        """Figures of the test slice: the model as it was written and opened again, against float32."""
        base = test.evaluate(dict.fromkeys(test.tables, FLOAT))
        made = test.evaluate_called(quantized)
        bootstrap = PairedBootstrap(len(base.losses))
        labels = {
            name: _of_label(test, base, made, bootstrap, column) for column, name in enumerate(test.names)
        }
        first = next(iter(labels.values()))
        return {"samples": len(base.losses), **first, "labels": labels if len(labels) > 1 else {}}

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


def _of_label(
    test: Slice, base: Losses, made: Losses, bootstrap: PairedBootstrap, column: int
) -> dict[str, Any]:
    """Figures of one label of the test slice: of the model in float32, of the one that was made, and the
    differences."""
    weights = None if test.weights is None else test.weights[:, column]
    labels, after, before = test.labels[:, column], made.logits[:, column], base.logits[:, column]
    return {
        **{
            name: {
                "ne": float(found.losses[:, column].mean() / test.base_entropy[column]),
                "auc": auc(
                    labels,
                    found.logits[:, column].astype(np.float32),
                    None if weights is None else torch.from_numpy(weights),
                ),
            }
            for name, found in (("float32", base), ("quantized", made))
        },
        "ne_difference": asdict(bootstrap.relative(made.losses[:, column], base.losses[:, column])),
        "auc_difference": asdict(bootstrap.auc(labels, after, before, weights)),
    }


def _wrong(knob: str, value: object, remedy: str) -> PluginError:
    return PluginError(f"plugins.low_precision.{knob}={value}: {remedy}")
