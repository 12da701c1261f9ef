"""What a line of the log looks like, and that a transfer's lines carry its name."""

import io
import json
import logging

import pytest

from relay_service.core.leases import LeaseTable
from relay_service.core.logs import (
    JsonFormatter,
    TextFormatter,
    clean_transfer,
    fields,
    transfer_id,
)

NASTY = 'one\ntwo "three" \\ \x00 é'


@pytest.fixture
def logged():
    """Returns a function that logs once, with a formatter, and gives the text."""

    def log(formatter, message, *args, **kwargs):
        stream = io.StringIO()
        handler = logging.StreamHandler(stream)
        handler.setFormatter(formatter)
        logger = logging.getLogger("a.logger")
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
        logger.info(message, *args, **kwargs)
        logger.removeHandler(handler)
        return stream.getvalue()

    return log


def test_json(logged):
    """One object per line with the standard keys; fields beside them, an own instance first."""
    line = logged(JsonFormatter("me"), "said %s", NASTY, extra=fields(bytes=3, seconds=0.5))
    assert line.count("\n") == 1
    said = json.loads(line)
    assert said.pop("time").endswith("+00:00")
    assert said == {
        "level": "INFO", "logger": "a.logger", "message": f"said {NASTY}", "instance": "me",
        "bytes": 3, "seconds": 0.5,
    }  # fmt: skip
    named = json.loads(logged(JsonFormatter("me"), "x", extra=fields(instance="other")))
    assert named["instance"] == "other"


def test_json_with_an_exception(logged):
    """A traceback is one more key of the same line."""
    try:
        int(NASTY)
    except ValueError:
        line = logged(JsonFormatter(), "failed", exc_info=True)
    assert line.count("\n") == 1
    assert "ValueError" in json.loads(line)["exception"]


def test_text(logged):
    """Fields follow the message; nobody's text begins a line of its own."""
    line = logged(TextFormatter(), "said %s", "x\ny", extra=fields(bytes=3, transport=""))
    assert line.count("\n") == 1
    assert line.endswith("INFO a.logger said x\\ny bytes=3\n")


def test_the_running_transfer(logged):
    """A line within a transfer says its name, unless it names another one."""
    token = transfer_id.set("abc")
    try:
        assert json.loads(logged(JsonFormatter(), "x"))["transfer"] == "abc"
        other = logged(JsonFormatter(), "x", extra=fields(transfer="def"))
        assert json.loads(other)["transfer"] == "def"
    finally:
        transfer_id.reset(token)
    assert "transfer" not in json.loads(logged(JsonFormatter(), "x"))


def test_a_name_from_elsewhere():
    """What another process calls its transfer is cut to what may stand in a log."""
    assert clean_transfer("a1b2") == "a1b2"
    assert clean_transfer('x\n{"level": "é"}') == "xlevel"
    assert len(clean_transfer("x" * 1000)) == 32


@pytest.mark.parametrize("how", ["released", "expired", "ended with its instance"])
def test_a_lease_is_told_twice(caplog, how):
    """A lease logs its begin, and its end with bytes and seconds, once; never its secret."""
    caplog.set_level("INFO")
    now = [0.0]
    table = LeaseTable(clock=lambda: now[0])
    lease = table.acquire("seed", "life", 1, "target")
    table.served(lease, "shm", 5)
    table.served(lease, "shm", 7)
    now[0] = 2.5
    if how == "expired":
        now[0] = 1000.0
        table.expire()
    elif how == "released":
        table.release(lease.lease)
        table.release(lease.lease)
    else:
        table.end_all("seed", "life")
    table.expire()
    begun, ended = caplog.records
    assert begun.getMessage() == "lease acquired"
    assert ended.getMessage() == f"lease {how}"
    assert (ended.fields["bytes"], ended.fields["holder"]) == (12, "target")
    assert ended.fields["seconds"] == now[0]
    assert table.bytes_served == {"shm": 12}
    assert lease.lease not in str([vars(record) for record in caplog.records])
