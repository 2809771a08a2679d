"""Low precision for a finished model: ``recpipe quantize CHECKPOINT +plugin=low_precision``."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Gt, Interval

from recpipe.plugin import Context, Contribution, Plugin, PluginError
from recpipe_low_precision.dense import TYPES
from recpipe_low_precision.model_quantizer import FinishedModel, ModelQuantizer, Quantized
from recpipe_low_precision.quantization import Quantization
from recpipe_low_precision.row_types import FLOAT, ROW_TYPES

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


def _wrong(knob: str, value: object, remedy: str) -> PluginError:
    return PluginError(f"plugins.low_precision.{knob}={value}: {remedy}")
