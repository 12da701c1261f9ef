"""What served, and what failed to."""

from engine_service.core.version_history import MAX_RECORDS, Result, VersionHistory, VersionRecord
from relay_service.core.instance import Weights


def test_what_serves_is_told_however_many_have_failed():
    """Of very many the oldest are forgotten, but never the one that serves."""
    history = VersionHistory()
    history.serve(Weights("v1", "d1", 1), "disk:a")
    history.serve(Weights("v2", "d2", 2), "disk:b", "me")
    for number in range(MAX_RECORDS + 5):
        history.add(VersionRecord(version=str(number), result=Result.FAILED))
    assert len(history.records) == MAX_RECORDS
    first, second = history.records[:2]
    assert (first.version, first.result, first.operator) == ("v2", Result.SERVES, "me")
    assert (second.version, history.records[-1].version) == ("6", str(MAX_RECORDS + 4))


def test_one_serves_at_a_time():
    """What served before it served."""
    history = VersionHistory()
    for epoch in range(1, 4):
        history.serve(Weights(f"v{epoch}", "d", epoch), "push")
    assert [one.result for one in history.records] == [Result.SERVED, Result.SERVED, Result.SERVES]
    assert [one.epoch for one in history.records] == [1, 2, 3]
