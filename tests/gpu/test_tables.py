"""Tables in every tier, against one big table and against plain TorchRec: bodies of the CPU's tests."""

from tests.tables.test_quantized import (
    test_rows_of_16_bits_are_read_and_written_whole,
    test_weights_of_16_bits_and_state_of_32,
)
from tests.tables.test_shared_tables import (
    test_resident_tables_are_plain_ones,
    test_tiers_are_plain_tables,
)
from tests.tables.test_tiered import (
    expected,
    test_equals_resident_tables,
    test_evaluation_moves_nothing,
    test_features_are_found_by_name,
    test_fetching_ahead_without_the_rows_in_flight_is_wrong,
    test_moving_weights_without_their_state_is_wrong,
    test_only_rows_of_the_batch_change,
    test_tiny_batches,
    test_values_written_between_batches_are_used,
)

__all__ = [
    "expected",
    "test_equals_resident_tables",
    "test_evaluation_moves_nothing",
    "test_features_are_found_by_name",
    "test_fetching_ahead_without_the_rows_in_flight_is_wrong",
    "test_moving_weights_without_their_state_is_wrong",
    "test_only_rows_of_the_batch_change",
    "test_resident_tables_are_plain_ones",
    "test_rows_of_16_bits_are_read_and_written_whole",
    "test_tiers_are_plain_tables",
    "test_tiny_batches",
    "test_values_written_between_batches_are_used",
    "test_weights_of_16_bits_and_state_of_32",
]
