"""What `make test` leaves to `make test-all`: it must stay within fifteen minutes on two cores.

Each is slow, and a faster test of its kind, or another cell of its matrix, stays in `make test`.
Of the large matrices it takes cells in which every pair of values occurs (`covering`).
"""

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations
from typing import TypeVar

C = TypeVar("C", bound=Hashable)

LEFT_OUT = frozenset({
    "tests/device/test_collector_memory.py",
    "tests/device/test_compiled.py",
    "tests/device/test_ranks_together.py::test_a_checkpoint_that_breaks_for_one_rank_is_its_error",
    "tests/device/test_ranks_together.py::test_a_rank_that_hangs_costs_the_timeout",
    "tests/device/test_ranks_together.py::test_a_rank_that_never_starts_is_missed",
    "tests/device/test_ranks_together.py::test_two_ranks_serve_a_quantised_model",
    "tests/device/test_smollm2_logits.py",
    "tests/device/test_updates_in_parts.py::test_any_order_and_any_cut[1024]",
    "tests/device/test_updates_in_parts.py::test_any_order_and_any_cut[384]",
    "tests/device/test_updates_raced.py::test_pause_update_and_continue_race",
    "tests/e2e/test_benchmarks.py::test_structure_cost_runs",
    "tests/e2e/test_benchmarks.py::test_weight_formats_runs",
    "tests/e2e/test_cut_off.py::test_memory_that_cannot_be_cut_off_never_serves",
    "tests/e2e/test_experts_moved.py::test_experts_are_relayed_and_moved",
    "tests/e2e/test_failures.py::test_matrix[directory-stop-50-grpc]",
    "tests/e2e/test_failures.py::test_matrix[seed_relay-stop-50-tcp]",
    "tests/e2e/test_failures.py::test_matrix[target_relay-kill-50-grpc]",
    "tests/e2e/test_fake_device.py::test_a_target_on_a_device_is_filled_from_a_seed_on_one[1]",
    "tests/e2e/test_families_relayed.py",
    "tests/e2e/test_interruptions.py::test_a_name_and_a_rank_that_are_taken_or_absent",
    "tests/e2e/test_kept_arena.py::test_a_kept_byte_that_is_wrong",
    "tests/e2e/test_kept_arena.py::test_what_is_forgotten_or_unfit_is_loaded",
    "tests/e2e/test_lifecycle.py::test_grace_over_and_second_sigterm",
    "tests/e2e/test_lifecycle.py::test_nothing_is_left",
    "tests/e2e/test_lifecycle.py::test_restarted_directory_is_whole_again",
    "tests/e2e/test_lifecycle.py::test_restarted_relay_is_whole_again",
    "tests/e2e/test_lost_routed.py::test_the_end_comes_during_a_recovery",
    "tests/e2e/test_lost_versions.py",
    "tests/e2e/test_main_job.py::test_a_wrong_relay_does_not_spoil_a_dummy",
    "tests/e2e/test_main_job.py::test_waits_for_pull_and_never_serves_before",
    "tests/e2e/test_other_placement.py",
    "tests/e2e/test_ranks.py::test_one_killed_rank_is_the_end_of_all[1]",
    "tests/e2e/test_refusals.py::test_free_ports_are_distinct",
    "tests/e2e/test_refusals.py::test_no_source_within_the_deadline",
    "tests/e2e/test_refusals.py::test_several_models_on_offer",
    "tests/e2e/test_streams.py::test_a_client_that_is_killed",
    "tests/e2e/test_streams.py::test_readers_that_do_not_read",
    "tests/e2e/test_update_faults.py::test_a_client_is_killed_in_a_push",
    "tests/e2e/test_update_faults.py::test_a_rank_hangs[staging]",
    "tests/e2e/test_update_faults.py::test_a_source_relay_is_killed",
    "tests/e2e/test_update_faults.py::test_an_engine_is_told_to_end[staging]",
    "tests/e2e/test_update_faults.py::test_no_room_on_a_rank",
    "tests/e2e/test_weights_on_disk.py::test_a_limited_load_is_seen_on_its_way",
    "tests/e2e/test_weights_on_disk.py::test_a_narrower_type_must_be_named",
    "tests/e2e/test_wire.py::test_flipped_bytes_are_named_and_never_served",
})  # fmt: skip
"""Files, tests or cells of one."""


def is_left_out(node: str) -> bool:
    """Whether a test is one of them, by its name."""
    return bool({node, node.partition("[")[0], node.partition("::")[0]} & LEFT_OUT)


def covering(rows: Sequence[C], traits: Mapping[C, set[object]]) -> list[C]:
    """Chooses rows so that each trait that any of them has is a trait of a chosen one."""
    missing = {trait for row in rows for trait in traits[row]}
    chosen = set()
    while missing:
        best = max(rows, key=lambda row: len(missing & traits[row]))
        missing -= traits[best]
        chosen.add(best)
    return [row for row in rows if row in chosen]


def pairs(row: Sequence[object]) -> set[object]:
    """Returns every pair of two columns' values."""
    return set(combinations(enumerate(row), 2))
