"""All checks, in their order: each takes the place and returns what it saw, or raises.

Later ones build on earlier ones, so that a device is held for a minute and not for ten.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.gpu import computing, memory
from tests.gpu.place import Place

CHECKS: tuple[Callable[[Place], str], ...] = (
    memory.arena_is_zero_and_a_view,
    computing.capture,
    computing.replay_equals_eager_before,
    memory.landing_from_another_process,
    computing.replay_equals_eager_after,
    computing.landed_weights_are_fresh_weights,
    computing.the_runner_serves,
    memory.blocks_built_on_the_host_arrive,
    computing.refills_leave_addresses_and_memory,
    computing.unused_memory_is_given_back,
    computing.a_killed_relay_disturbs_nobody,
    memory.memory_outlives_its_exporter,
    memory.rates,
    memory.a_wrong_device_is_refused,
    memory.a_wrong_allocation_is_refused,
    memory.a_sealed_arena_takes_no_writer,
    computing.nccl_is_captured,
)
