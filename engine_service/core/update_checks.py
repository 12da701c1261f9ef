"""What must hold before an update begins, and of what it has staged. Plain Python."""

from __future__ import annotations

from collections.abc import Sequence

from engine_service.core.instance import Instance
from engine_service.core.update_request import WeightUpdate
from engine_service.errors import ArenaError, WrongState
from relay_service.core.instance import State
from relay_service.core.manifest import Manifest, weights_digest

SERVING = (State.READY, State.PAUSED)


def check_serves(instance: Instance, wanted: WeightUpdate) -> None:
    """Raises `WrongState` unless just the weights serve that an update is meant for."""
    state, weights = instance.lifecycle.state, instance.engine.weights
    if state not in SERVING:
        raise WrongState(
            f"{instance.identity.name} is {state}: weights that serve can be updated",
            field="state", expected="READY or PAUSED", found=str(state),
        )  # fmt: skip
    if instance.experts and instance.experts.lost:
        raise WrongState(
            "experts are lost: weights are updated when they are back", field="experts",
            hint="see `seedrelay experts recover`",
        )  # fmt: skip
    if wanted.base_digest and wanted.base_digest != weights.digest:
        raise WrongState(
            "other weights serve than those that the update is for", field="base_digest",
            expected=wanted.base_digest, found=weights.digest,
        )  # fmt: skip


def check_staged(
    wanted: WeightUpdate, serves: Sequence[Manifest], staged: Sequence[Manifest]
) -> None:
    """Raises `ArenaError` for what no rank may hold, `WrongState` for other weights than meant."""
    for old, new in zip(serves, staged, strict=True):
        if difference := old.layout_difference(new):
            raise ArenaError(f"rank {old.rank} staged another layout: {difference}")
    digest = weights_digest(list(staged))
    if not digest:
        raise ArenaError("a rank staged weights without their digests")
    if wanted.expected_digest and wanted.expected_digest != digest:
        raise WrongState(
            "what is staged is not what was expected", field="expected_digest",
            expected=wanted.expected_digest, found=digest,
        )  # fmt: skip
