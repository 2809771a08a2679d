"""Low precision for finished models: types of rows and layers, the quantized checkpoint, ``recpipe quantize``
and its search."""

from typing import TYPE_CHECKING

from recpipe.commands import Command
from recpipe.common.process import lazily
from recpipe_low_precision.model_quantizer import FinishedModel, ModelQuantizer, Quantized, ReportSection

if TYPE_CHECKING:
    from recpipe.answers.row_types import ROW_TYPES, decode_rows, encode_rows, row_bytes
    from recpipe.answers.stored import FloatCheckpoint
    from recpipe_low_precision.bags import LowPrecisionBags, LowPrecisionRows, LowPrecisionTables, RowType
    from recpipe_low_precision.checkpoint import put_rows, write_quantized
    from recpipe_low_precision.opened import open_quantized, put_rows_of

QUANTIZE = Command(
    "recpipe_low_precision.command:quantize",
    "CHECKPOINT +plugin=low_precision [output=DIRECTORY]",
    "its tables in fewer bits, under a bound on the loss of quality",
    python="recpipe_low_precision.command:quantize_for",
)

NAMES = {
    "BITS": "recpipe.answers.row_types:BITS",
    "Called": "recpipe.model.call:Called",
    "EIGHT_BITS": "recpipe.private_api.int8:EIGHT_BITS",
    "FewRows": "recpipe.answers.stored:FewRows",
    "FinishedModel": "recpipe_low_precision.model_quantizer:FinishedModel",
    "FloatCheckpoint": "recpipe.answers.stored:FloatCheckpoint",
    "LARGEST_WEIGHT_CODE": "recpipe.private_api.int8:LARGEST",
    "Layer": "recpipe_low_precision.layers:Layer",
    "LowPrecisionBags": "recpipe_low_precision.bags:LowPrecisionBags",
    "LowPrecisionLinear": "recpipe_low_precision.layers:LowPrecisionLinear",
    "LowPrecisionRows": "recpipe_low_precision.bags:LowPrecisionRows",
    "LowPrecisionTables": "recpipe_low_precision.bags:LowPrecisionTables",
    "ModelQuantizer": "recpipe_low_precision.model_quantizer:ModelQuantizer",
    "Quantized": "recpipe_low_precision.model_quantizer:Quantized",
    "ROW_TYPES": "recpipe.answers.row_types:ROW_TYPES",
    "ReportSection": "recpipe_low_precision.model_quantizer:ReportSection",
    "RowType": "recpipe_low_precision.bags:RowType",
    "SEVEN_BITS": "recpipe.private_api.int8:SEVEN_BITS",
    "auc": "recpipe.model.metrics:auc",
    "bag_keys": "recpipe_low_precision.bags:bag_keys",
    "bfloat16_has_units": "recpipe_low_precision.layers:bfloat16_has_units",
    "decode_rows": "recpipe.answers.row_types:decode_rows",
    "encode_rows": "recpipe.answers.row_types:encode_rows",
    "fits": "recpipe.answers.row_types:fits",
    "free_memory": "recpipe.common.machine:free_memory",
    "int8_adds_up": "recpipe.private_api.int8:int8_adds_up",
    "is_linear": "recpipe_low_precision.layers:is_linear",
    "median_seconds": "recpipe.common.timing:median_seconds",
    "open_quantized": "recpipe_low_precision.opened:open_quantized",
    "put_rows": "recpipe_low_precision.checkpoint:put_rows",
    "put_rows_of": "recpipe_low_precision.opened:put_rows_of",
    "replace_module": "recpipe.answers.stored:replace_module",
    "require_ids": "recpipe.data.parts:require_ids",
    "row_bytes": "recpipe.answers.row_types:row_bytes",
    "row_scales": "recpipe.answers.row_types:row_scales",
    "seconds_by_round": "recpipe.common.timing:seconds_by_round",
    "table_bytes": "recpipe_low_precision.checkpoint:table_bytes",
    "write_quantized": "recpipe_low_precision.checkpoint:write_quantized",
}
"""What this package offers to plugins, most of which was in ``recpipe.kit`` and ``recpipe.plugin`` once.

It is imported when it is first used: the help, which shows the command, must not wait for torch.
"""

__all__ = [
    "ROW_TYPES",
    "FinishedModel",
    "FloatCheckpoint",
    "LowPrecisionBags",
    "LowPrecisionRows",
    "LowPrecisionTables",
    "ModelQuantizer",
    "Quantized",
    "ReportSection",
    "RowType",
    "decode_rows",
    "encode_rows",
    "open_quantized",
    "put_rows",
    "put_rows_of",
    "row_bytes",
    "write_quantized",
]

__getattr__ = lazily(__name__, NAMES)
