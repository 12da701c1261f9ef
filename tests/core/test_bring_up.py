"""A start that breaks in a way that nobody thought of."""

import asyncio
import json

import pytest
from engines import FakeRanks
from fakes import byte_level_tokenizer

from engine_service.config import EngineConfig
from engine_service.core.bring_up import BringUp
from engine_service.core.fill import Filler
from engine_service.core.instance import Identity, Instance
from relay_service.core.instance import State


class BrokenRanks(FakeRanks):
    """Their memory cannot be had, for a reason that is no error of ours."""

    async def allocate(self, _starts: object) -> None:
        """Fails."""
        raise KeyError("nobody thought of it")


@pytest.mark.parametrize("load_format", ["disk", "dummy"])
async def test_the_instance_fails_with_the_reason(tmp_path, load_format):
    """It doesn't wait for ever as if it still were to come."""
    (tmp_path / "tokenizer.json").write_text(byte_level_tokenizer().to_str())
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300, "eos_token_id": 2}))
    config = EngineConfig(model=str(tmp_path), listen="127.0.0.1:0", load_format=load_format)
    instance = Instance(
        config, Identity("one", "life", "tiny"), BrokenRanks(), None, lambda _: None
    )
    with pytest.raises(KeyError):
        async with asyncio.timeout(20):
            await BringUp(instance, Filler(instance)).run()
    assert instance.lifecycle.state is State.FAILED
    assert instance.lifecycle.reason == "KeyError: 'nobody thought of it'"
