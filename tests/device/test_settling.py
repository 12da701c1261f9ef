"""Huge pages come beside the first steps, and are told of once."""

import threading

import pytest

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


def _settled(arena: FakeArena) -> None:
    (moving,) = (thread for thread in threading.enumerate() if thread.name == THREAD)
    arena.may_move.set()
    moving.join(SECONDS)


@pytest.mark.parametrize(("after", "told"), [("huge (8 bytes)", "huge (8 bytes)"), ("4 KiB", "")])
def test_what_is_new_is_told_once(after, told):
    """Not before it is done; and that nothing has changed is no news."""
    arena = FakeArena(after)
    settler = Settler(arena)
    assert [settler.news(), settler.news()] == ["", ""]
    _settled(arena)
    assert [settler.news(), settler.news()] == [told, ""]
    assert arena.moves == 1
