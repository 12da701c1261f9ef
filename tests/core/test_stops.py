"""Stop texts end an answer exactly there, wherever the pieces begin and end."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_service.core.stops import StopFinder

TEXT = "ABCDEFGHIJK"


def through(pieces, stops, *, shows_stop: bool = False) -> tuple[str, str]:
    """Returns the text that came through, and the stop text that was found."""
    finder, shown = StopFinder(stops, shows_stop=shows_stop), ""
    for piece in pieces:
        shown += finder.push(piece)
        if finder.found:
            return shown, finder.found
    return shown + finder.flush(), ""


@pytest.mark.parametrize(
    ("stops", "shown", "found"),
    [
        (["DEFGHIJ"], "ABC", "DEFGHIJ"),
        (["XYZ", "CDQ"], TEXT, ""),
        (["A"], "", "A"),
        (["K"], "ABCDEFGHIJ", "K"),
        (["KL"], TEXT, ""),
        (["CD", "BCDE"], "AB", "CD"),
        (["DE", "CDE"], "AB", "CDE"),
        ([], TEXT, ""),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 11])
def test_where_it_is_cut(stops, shown, found, size):
    """The text ends before the stop text that is whole first; a near miss is shown in full."""
    pieces = [TEXT[i : i + size] for i in range(0, len(TEXT), size)]
    assert through(pieces, stops) == (shown, found)


def test_shown_if_wanted():
    """With the stop text shown, nothing behind it is."""
    assert through(["ABC", "DEFG"], ["CDE"], shows_stop=True) == ("ABCDE", "CDE")


def test_ordinary_text_is_not_held_back():
    """Only an end that may begin a stop text waits, and no longer than it must."""
    finder = StopFinder(["</s>"], shows_stop=False)
    assert [finder.push(piece) for piece in ("one <", "two", "</", "s", "x")] == [
        "one ", "<two", "", "", "</sx",
    ]  # fmt: skip


@given(
    st.text("ab", max_size=20),
    st.lists(st.text("ab", min_size=1, max_size=4), max_size=3),
    st.data(),
)
def test_seams_change_nothing(text, stops, data):
    """However a text is cut into pieces, the same of it is shown."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    ends = [*cuts, len(text)]
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], ends, strict=True)]
    assert through(pieces, stops) == through(list(text), stops)
