"""Quantised weights go through the relay as they lie in the arena."""

from __future__ import annotations

from pathlib import Path

import pytest
from stage import Stage, answer, reach

from engine_service.device.formats.layouts import choose_layout
from engine_service.errors import ConfigError
from relay_service.core.dtypes import DType


def _serves(name: str) -> bool:
    try:
        return bool(choose_layout(name, DType.F32, "cpu"))
    except ConfigError:
        return False


@pytest.mark.parametrize(
    "name",
    [
        "int4",
        pytest.param("fp8", marks=pytest.mark.full),
        pytest.param("fp8-ue8m0", marks=pytest.mark.full),
        pytest.param(
            "int8",
            marks=[
                pytest.mark.skipif(not _serves("int8"), reason="not on this processor"),
                pytest.mark.full,
            ],
        ),
    ],
)
async def test_a_target_serves_what_its_seed_does(stage: Stage, model: Path, name: str) -> None:
    """Same digest, same tokens, and no weights on the target's disk."""
    relay = stage.relay()
    seed = stage.engine(model, "--relay", relay.address, "--weight-format", name)
    target = stage.target(relay, "--weight-format", name)
    filled, held = await reach(target), await reach(seed)
    assert filled.weights_digest == held.weights_digest != ""
    assert await answer(target) == await answer(seed)
