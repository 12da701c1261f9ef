"""The error trees that the docstrings draw are the trees that exist."""

import inspect
import re

import pytest

from clients import errors as client_errors
from engine_service import errors as engine_errors
from relay_service import errors as relay_errors


def drawn(text: str) -> list[tuple[int, str]]:
    """Reads depth and name of every class of a drawn tree, from top to bottom."""
    lines = re.findall(r"^((?:[│├└─ ]*))([A-Z]\w+)(?:\s{2,}.*)?$", text, re.MULTILINE)
    return [(len(indent) // 4, name) for indent, name in lines]


def existing(kind: type, depth: int = 0) -> list[tuple[int, str]]:
    """Returns depth and name of every class below `kind`, in the order of the file."""
    below = sorted(kind.__subclasses__(), key=lambda one: inspect.getsourcelines(one)[1])
    return [(depth, kind.__name__), *(row for one in below for row in existing(one, depth + 1))]


@pytest.mark.parametrize(
    ("module", "root"),
    [
        (relay_errors, relay_errors.RelayError),
        (engine_errors, engine_errors.EngineError),
        (client_errors, client_errors.ClientError),
    ],
    ids=["relay", "engine", "clients"],
)
def test_the_tree_is_as_drawn(module, root):
    """The docstring names exactly the classes that exist, each below its base."""
    classes = [kind for kind in vars(module).values() if inspect.isclass(kind)]
    own = {kind.__name__ for kind in classes if kind.__module__ == module.__name__}
    assert sorted(drawn(module.__doc__)) == sorted(existing(root))
    assert {name for _, name in drawn(module.__doc__)} == own
