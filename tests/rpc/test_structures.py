"""Structures that cannot be kept to: whoever asked is told, and nobody else notices."""

import asyncio
import json

import pytest
from engines import VOCAB, tokens
from tokenizers import Tokenizer, models

from clients.errors import CallFailed
from engine_service.core.tokenizer import TextCodec

MANY = "start: " + " | ".join(f'"a{number:04}"' for number in range(2500))


async def test_a_structure_that_grows_too_complex(service):
    """Its answers end with the reason, and the stream that shares their steps goes on."""
    beside = asyncio.create_task(service.answer(**tokens(1, max_tokens=20)))
    await service.ranks.stepping.wait()
    with pytest.raises(CallFailed, match="2501 items") as failed:
        await service.answer(**tokens(2, structure={"grammar": MANY}, n=2))
    assert (failed.value.code, failed.value.reason) == ("INVALID_ARGUMENT", "InvalidRequest")
    assert failed.value.details["field"] == "sampling.structure.grammar"
    assert [list(chunk.token_ids) for chunk in await beside] == [[n] for n in range(2, 22)]
    assert service.scheduler.pool.used == 0


async def test_a_choice_among_thousands(service):
    """However many texts there are to choose from, one of them comes whole."""
    texts = [f"a{number:04}" for number in range(3000)]
    chunks = await service.answer(
        **tokens(2, max_tokens=9, structure={"choice": {"options": texts}})
    )
    assert "".join(chunk.text for chunk in chunks) in texts


async def test_a_tokenizer_of_which_no_structure_can_be_made(service):
    """The model serves all the same, and says what it does not offer."""
    words = models.WordLevel({"a": 0, "b": 1}, unk_token="a")
    config = {"vocab_size": VOCAB, "eos_token_id": 250}
    service.instance.codec = TextCodec(
        {
            "tokenizer.json": Tokenizer(words).to_str().encode(),
            "config.json": json.dumps(config).encode(),
        }
    )
    with pytest.raises(CallFailed, match="tokenizer allows no structure") as refused:
        await service.answer(**tokens(1, structure={"regex": "a"}))
    assert refused.value.code == "UNIMPLEMENTED"
    assert len(await service.answer(**tokens(1))) == 3
