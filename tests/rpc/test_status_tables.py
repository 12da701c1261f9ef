"""Errors of both services as gRPC statuses."""

import grpc
import pytest

from engine_service import errors as engine_errors
from engine_service.rpc import status as engine_status
from relay_service import errors as relay_errors
from relay_service.rpc import status as relay_status


def leaves(kind: type) -> list[type]:
    """Returns every class of a tree that has no subclass."""
    below = kind.__subclasses__()
    return [leaf for one in below for leaf in leaves(one)] if below else [kind]


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        *((relay_status, kind) for kind in leaves(relay_errors.RelayError)),
        *((engine_status, kind) for kind in leaves(engine_errors.EngineError)),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_every_error_has_a_status(status, kind):
    """Every error that the services raise has a status, and none is OK or UNKNOWN."""
    error = kind.__new__(kind)
    Exception.__init__(error, "message")
    error.details = {}
    code = status.code_of(error)
    assert isinstance(code, grpc.StatusCode)
    assert code not in (grpc.StatusCode.OK, grpc.StatusCode.UNKNOWN)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("FAILED_PRECONDITION", grpc.StatusCode.FAILED_PRECONDITION),
        ("DATA_LOSS", grpc.StatusCode.DATA_LOSS),
        ("NO_SUCH_STATUS", grpc.StatusCode.UNAVAILABLE),
        ("", grpc.StatusCode.UNAVAILABLE),
    ],
)
def test_a_fill_fails_with_the_relays_status(status, code):
    """An engine that could not be filled answers with the status of what the relay found."""
    assert engine_status.code_of(engine_errors.FillFailed("no", status=status)) is code


@pytest.mark.parametrize("status", [relay_status, engine_status], ids=["relay", "engine"])
@pytest.mark.parametrize("text", ["a" * 5000, "é" * 5000, "삼" * 5000, "short", ""])
def test_a_long_text_is_cut_between_characters(status, text):
    """A text is cut to so many bytes, whole characters only, and says that it was."""
    cut = status._clip(text, 1000)
    assert len(cut.encode()) <= 1000
    assert cut == text or (cut.endswith("…") and text.startswith(cut[:-1]))
    assert (cut == text) == (len(text.encode()) <= 1000)
