"""Text that is streamed: whole characters, and an end exactly where it was asked for."""

import json

import pytest
from engines import tokens
from fakes import byte_level_tokenizer

from engine_service.core.tokenizer import TextCodec
from seedrelay.v1 import engine_pb2

STORY = "é 삼겹살 👩‍👩‍👧 end"
LETTERS = "ABCDEFGHIJK"
END, THE = (byte_level_tokenizer().token_to_id(token) for token in ("<|end|>", "Ġthe"))
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


async def told(service, story: str, **sampling) -> list[engine_pb2.GenerateResponse]:
    """Returns the messages of an answer that tells a story, one byte per token."""
    structure = {"choice": {"options": [story]}}
    settings = {"max_tokens": 60, "ignore_eos": True, "structure": structure} | sampling
    return await service.answer(**tokens(1, **settings))


def text_of(chunks) -> str:
    """Returns the whole text of an answer."""
    return "".join(chunk.text for chunk in chunks)


async def test_no_character_is_split(service):
    """Accents, Hangul and joined emoji, a byte per token, are streamed as they are."""
    chunks = await told(service, STORY)
    said = [token for chunk in chunks for token in chunk.token_ids]
    assert bytes(said[: len(STORY.encode())]).decode() == text_of(chunks) == STORY
    assert not any(REPLACEMENT in chunk.text for chunk in chunks)


@pytest.mark.parametrize("count", range(1, len(STORY.encode())))
async def test_a_cut_within_a_character(service, count):
    """An answer that its length ends within a character shows all that was whole before."""
    chunks = await told(service, STORY, max_tokens=count)
    whole = STORY.encode()[:count].decode(errors="ignore")
    assert text_of(chunks).rstrip(REPLACEMENT) == whole
    assert not any(REPLACEMENT in chunk.text for chunk in chunks[:-1])
    assert chunks[-1].finish_reason == engine_pb2.FINISH_REASON_LENGTH


async def test_bytes_that_are_no_text(service):
    """Bytes that never become a character are shown as such, before other text and at the end."""
    for count, text in ((1, REPLACEMENT), (2, f"{REPLACEMENT} the")):
        chunks = await service.answer(**tokens(0xFE, max_tokens=count, ignore_eos=True))
        assert text_of(chunks) == text


@pytest.mark.parametrize(
    ("stops", "text", "found"),
    [
        (["DEFGHIJ"], "ABC", "DEFGHIJ"),
        (["XYZ", "CDQ"], LETTERS, ""),
        (["A"], "", "A"),
        (["AB"], "", "AB"),
        (["K"], "ABCDEFGHIJ", "K"),
        (["KL"], LETTERS, ""),
    ],
)
async def test_stops(service, stops, text, found):
    """Text is cut exactly before a stop that came over many tokens; a near miss is shown whole."""
    chunks = await told(service, LETTERS, stop=stops)
    assert (text_of(chunks), chunks[-1].stop_text) == (text, found)
    assert service.scheduler.pool.used == 0


async def test_a_stop_within_a_token(service):
    """A stop that lies inside one token cuts the token's text."""
    (chunk,) = await service.answer(**tokens(THE - 1, stop=["he"], ignore_eos=True))
    assert (list(chunk.token_ids), chunk.text, chunk.stop_text) == ([THE], " t", "he")


@pytest.fixture
def many_ends(service):
    """A model whose end tokens are named in two files, three in all."""
    files = service.instance.files | {
        "config.json": json.dumps({"vocab_size": 300}).encode(),
        "generation_config.json": json.dumps({"eos_token_id": [5, 9]}).encode(),
        "tokenizer_config.json": json.dumps({"eos_token": "<|end|>"}).encode(),
    }
    service.instance.codec = TextCodec(files)
    return service


@pytest.mark.parametrize("end", [5, 9, END])
async def test_every_end_token_counts(many_ends, end):
    """Each token that any file names ends an answer, unless it ignores them; a stop id always."""
    asked = tokens(end - 1, max_tokens=3)
    (last,) = await many_ends.answer(**asked)
    assert (last.finish_reason, last.stop_token_id) == (engine_pb2.FINISH_REASON_STOP, end)
    asked["sampling"] |= {"ignore_eos": True}
    *_, last = await many_ends.answer(**asked)
    assert last.finish_reason == engine_pb2.FINISH_REASON_LENGTH
    asked["sampling"] |= {"stop_token_ids": [end]}
    (last,) = await many_ends.answer(**asked)
    assert (last.finish_reason, last.stop_token_id) == (engine_pb2.FINISH_REASON_STOP, end)
