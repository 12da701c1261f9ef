"""Which ranks compute together, as JSON objects; see `report`."""

from __future__ import annotations

from typing import Any

from seedrelay.v1 import engine_pb2


def membership(message: engine_pb2.Membership) -> dict[str, Any] | None:
    """Returns who computes together, and what was lost; none where nobody has decided on it."""
    if not message.epoch:
        return None
    return {
        "epoch": message.epoch,
        "state": state_name(message.state),
        "members": [
            {"rank": one.rank, "group": one.group, "pid": one.pid} for one in message.members
        ],
        "groups_lost": message.groups_lost,
        "lost": {str(one.layer): list(one.experts) for one in message.lost},
        "reason": message.reason,
        "on_rank_loss": message.on_rank_loss,
        "progress": progress(message.progress) if message.HasField("progress") else None,
    }


def progress(message: engine_pb2.ExpertProgress) -> dict[str, Any]:
    """Returns how far a recovery or a scaling is."""
    return {
        "phase": message.phase, "bytes_done": message.bytes_done,
        "bytes_total": message.bytes_total, "source": message.source, "note": message.note,
    }  # fmt: skip


def state_name(value: engine_pb2.MembershipState) -> str:
    """Returns a state without its prefix."""
    return str(engine_pb2.MembershipState.Name(value)).removeprefix("MEMBERSHIP_STATE_")


def line(shown: dict[str, Any]) -> str:
    """Returns who computes together, for people."""
    lost, reason = shown["groups_lost"], shown["reason"]
    experts = sum(map(len, shown["lost"].values()))
    ranks, groups = shown["members"], {one["group"] for one in shown["members"]}
    gone = f"{counted(experts, 'expert')} lost in {counted(len(shown['lost']), 'layer')}"
    return (
        f"membership {shown['epoch']}: {shown['state']}, "
        f"{counted(len(ranks), 'rank')} in {counted(len(groups), 'group')}"
        + (f", {counted(lost, 'group')} lost" if lost else "")
        + (f", {gone}" if experts else "")
        + (f": {reason}" if reason else "")
    )


def progress_line(shown: dict[str, Any]) -> str:
    """Returns how far a change is, for people."""
    where = f" from {shown['source']}" if shown["source"] else ""
    total = shown["bytes_total"]
    how_much = f": {shown['bytes_done']}/{total} bytes" if total else ""
    return f"{shown['phase']}{where}{how_much}" + (f" ({shown['note']})" if shown["note"] else "")


def counted(number: int, what: str) -> str:
    """Returns a number of things in words."""
    return f"{number} {what}{'' if number == 1 else 's'}"
