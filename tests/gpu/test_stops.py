"""Runs that are stopped, killed and resumed, bitwise: bodies of the CPU's tests."""

from tests.training.test_trainer import (
    test_a_new_learning_rate_counts,
    test_a_resumed_run_tells_where_it_stands_and_counts_the_whole_and_its_part,
    test_a_signal_leaves_a_checkpoint_to_go_on_from,
    test_kill_9_leaves_the_last_whole_checkpoint,
    test_momentum_of_the_dense_part_is_resumed,
    test_other_optimizers_resume_bitwise,
    test_resumed_under_another_policy,
    test_resuming_at_another_position_is_seen,
    test_stopped_and_resumed_equals_never_stopped,
    trained,
)

__all__ = [
    "test_a_new_learning_rate_counts",
    "test_a_resumed_run_tells_where_it_stands_and_counts_the_whole_and_its_part",
    "test_a_signal_leaves_a_checkpoint_to_go_on_from",
    "test_kill_9_leaves_the_last_whole_checkpoint",
    "test_momentum_of_the_dense_part_is_resumed",
    "test_other_optimizers_resume_bitwise",
    "test_resumed_under_another_policy",
    "test_resuming_at_another_position_is_seen",
    "test_stopped_and_resumed_equals_never_stopped",
    "trained",
]
