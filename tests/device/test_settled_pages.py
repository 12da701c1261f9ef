"""Huge pages come beside the first steps, and are told of once."""

import threading

import pytest
from fakes import collapses
from tiny_llama import Sequence, serving_rank, write_checkpoint

from engine_service.device.settling import THREAD, Settler

SECONDS = 20.0


class FakeArena:
    """Moves when it is let."""

    def __init__(self, after: str) -> None:
        self.page_kind = "4 KiB"
        self.moves = 0
        self.may_move = threading.Event()
        self._after = after

    def gather_pages(self) -> None:
        """Waits, and moves."""
        assert self.may_move.wait(SECONDS)
        self.page_kind, self.moves = self._after, self.moves + 1


def _join() -> None:
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(SECONDS)


@pytest.mark.parametrize(("after", "told"), [("huge (8 bytes)", "huge (8 bytes)"), ("4 KiB", "")])
def test_what_is_new_is_told_once(after, told):
    """Not before it is done; and that nothing has changed is no news."""
    arena = FakeArena(after)
    settler = Settler(arena)
    assert [settler.news(), settler.news()] == ["", ""]
    arena.may_move.set()
    _join()
    assert [settler.news(), settler.news()] == [told, ""]
    assert arena.moves == 1


@pytest.mark.skipif(not collapses(), reason="this kernel moves no memory into huge pages")
def test_a_rank_that_serves_moves_its_weights(tmp_path):
    """Nobody asks for it; tokens and address are what they were."""
    rank = serving_rank(write_checkpoint(tmp_path / "model", vocab_size=1 << 15))
    address, row = rank.arena.address, Sequence([5, 6, 7]).row()
    sampled = [rank.step((row,))]
    _join()
    sampled += [rank.step((row,)), rank.step((row,))]
    (told,) = filter(None, (one.page_kind for one in sampled))
    assert told == rank.arena.page_kind
    assert told.startswith("huge")
    assert len({one.tokens for one in sampled}) == 1
    assert rank.arena.address == address
