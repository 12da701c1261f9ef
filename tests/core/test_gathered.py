"""Pieces are joined into fewer messages, and nothing of them is lost or held for ever."""

from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_service.core.answers import Ending, Piece, gathered
from engine_service.core.request import Finish
from relay_service.core.instance import Weights

OLD, NEW = Weights(version="old", epoch=1), Weights(version="new", epoch=2)
END = Ending(finish=Finish.STOP, stop=None, prompt_tokens=1, completion_tokens=1, spans=[])


def _piece(token, index=0, weights=OLD, ending=None, *, degraded=False):
    return Piece(
        index=index, weights=weights, tokens=[token], text=f"{token} ", ending=ending,
        degraded=degraded,
    )  # fmt: skip


async def _gathered(pieces, interval):
    async def source():
        for piece in pieces:
            yield piece

    return [piece async for piece in gathered(source(), interval)]


async def test_the_first_and_the_last_piece_are_not_held_back():
    """Between them a message has as many tokens as were asked for."""
    pieces = [_piece(n) for n in range(8)] + [_piece(8, ending=END)]
    messages = await _gathered(pieces, 3)
    assert [message.tokens for message in messages] == [[0], [1, 2, 3], [4, 5, 6], [7, 8]]
    assert [bool(message.ending) for message in messages] == [False, False, False, True]


async def test_no_message_holds_tokens_of_two_weights():
    """What the old ones made is sent by itself, under their name."""
    pieces = [_piece(0), _piece(1), _piece(2, weights=NEW), _piece(3, weights=NEW, ending=END)]
    messages = await _gathered(pieces, 10)
    assert [(m.tokens, m.weights.version) for m in messages] == [
        ([0], "old"), ([1], "old"), ([2, 3], "new"),
    ]  # fmt: skip


@given(
    st.lists(st.integers(0, 2), max_size=40), st.integers(1, 6),
    *[st.lists(st.booleans(), min_size=40, max_size=40)] * 2,
)  # fmt: skip
async def test_every_answer_keeps_its_tokens_in_order(answers, interval, changes, marks):
    """Whatever the order in which answers get them, and the weights and marks change."""
    pieces = [
        _piece(n, index, NEW if changes[n] else OLD, degraded=marks[n])
        for n, index in enumerate(answers)
    ] + [_piece(100 + index, index, ending=END) for index in range(3)]
    marked = {piece.tokens[0]: (piece.weights, piece.degraded) for piece in pieces}
    messages = await _gathered(pieces, interval)
    for index in range(3):
        mine = [piece for piece in pieces if piece.index == index]
        joined = [message for message in messages if message.index == index]
        assert [t for m in joined for t in m.tokens] == [t for p in mine for t in p.tokens]
        assert "".join(m.text for m in joined) == "".join(p.text for p in mine)
        assert all(len(m.tokens) <= interval for m in joined[:-1])
        assert all(marked[t] == (m.weights, m.degraded) for m in joined for t in m.tokens)
        assert joined[-1].ending is END


async def test_leaving_closes_what_the_pieces_come_from():
    """Whoever reads no further frees the answer, at once."""
    closed = []

    async def source():
        try:
            while True:
                yield _piece(1)
        finally:
            closed.append(True)

    async with aclosing(gathered(source(), 4)) as messages:
        async for _ in messages:
            break
    assert closed


async def test_an_error_comes_after_what_was_held():
    """The last piece says that an error ended it; then comes the error."""
    broken = Ending(finish=Finish.ERROR, stop=None, prompt_tokens=1, completion_tokens=2, spans=[])

    async def source():
        yield _piece(0)
        yield _piece(1)
        yield Piece(index=0, weights=OLD, ending=broken)
        raise RuntimeError

    messages = gathered(source(), 10)
    found = [await anext(messages) for _ in range(2)]
    with pytest.raises(RuntimeError):
        await anext(messages)
    assert [message.tokens for message in found] == [[0], [1]]
    assert found[-1].ending is broken
