"""Which ranks compute together → protocol buffers."""

from __future__ import annotations

from engine_service.core.instance import Instance
from engine_service.core.membership import ExpertProgress
from seedrelay.v1 import engine_pb2


def membership_to_proto(instance: Instance) -> engine_pb2.Membership | None:
    """Returns who computes together, and how far a change of that is; none before there is any."""
    now = instance.membership
    if now is None:
        return None
    progress = instance.recovery.progress if instance.recovery else None
    return engine_pb2.Membership(
        epoch=now.epoch,
        state=f"MEMBERSHIP_STATE_{now.state.name}",
        members=[engine_pb2.Member(rank=m.rank, group=m.group, pid=m.pid) for m in now.members],
        groups_lost=now.groups_lost,
        lost=[
            engine_pb2.LostExperts(layer=layer, experts=experts)
            for layer, experts in sorted(now.lost.items())
        ],
        reason=now.reason,
        on_rank_loss=instance.config.on_rank_loss,
        progress=progress_to_proto(progress) if progress else None,
    )


def progress_to_proto(progress: ExpertProgress) -> engine_pb2.ExpertProgress:
    """Returns how far a recovery or a scaling is."""
    return engine_pb2.ExpertProgress(
        phase=progress.phase, bytes_done=progress.bytes_done, bytes_total=progress.bytes_total,
        source=progress.source, note=progress.note,
    )  # fmt: skip
