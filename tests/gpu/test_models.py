"""Models that people bring, under every technique and in loops of their own: bodies of the CPU's tests."""

from tests.any_model.test_loop import (
    test_a_loop_of_ones_own_trains_as_with_plain_modules,
    test_under_lightning,
)
from tests.any_model.test_matrix import (
    batches,
    test_a_technique_trains_a_model_as_by_hand,
    test_stopping_and_resuming_is_bitwise,
    test_under_sgd,
    test_what_was_trained_loads_into_plain_torchrec,
    trained_on,
)

__all__ = [
    "batches",
    "test_a_loop_of_ones_own_trains_as_with_plain_modules",
    "test_a_technique_trains_a_model_as_by_hand",
    "test_stopping_and_resuming_is_bitwise",
    "test_under_lightning",
    "test_under_sgd",
    "test_what_was_trained_loads_into_plain_torchrec",
    "trained_on",
]
