"""What one looks at when something is wrong → protocol buffers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from google.protobuf import timestamp_pb2

from engine_service.core.instance import Instance
from engine_service.core.rank_memory import RankMemory, resident_bytes, staged_bytes
from engine_service.core.turn import Turn
from engine_service.core.update_session import Session
from engine_service.rpc.convert_check import check_to_proto
from engine_service.rpc.convert_pause import closing_to_proto
from engine_service.rpc.convert_update import record_to_proto
from seedrelay.v1 import engine_pb2


async def debug_to_proto(instance: Instance, session: Session | None) -> engine_pb2.DebugStatus:
    """Returns it all, as it is now; `session` is that of an update, while there is one."""
    memory = await _memory(instance, session)
    debug = engine_pb2.DebugStatus(
        locks=[
            engine_pb2.LockHolder(
                side=one.side, purpose=one.purpose, waits=one.waits, age_seconds=one.age_seconds
            )
            for one in instance.pauser.lock.holders()
        ],
        versions=map(record_to_proto, instance.history.records),
        memory=[
            engine_pb2.RankMemory(
                rank=one.rank, resident_bytes=one.resident_bytes, staged_bytes=one.staged_bytes
            )
            for one in memory
        ],
    )
    if closing := instance.engine.gate.closed_by:
        debug.pause.CopyFrom(closing_to_proto(closing))
    if session:
        debug.session.CopyFrom(_session_to_proto(session, instance.turn))
    if check := instance.last_check:
        debug.last_check.CopyFrom(check_to_proto(check))
        nanos = int(check.ended_at * 1e9)
        ended = timestamp_pb2.Timestamp(seconds=nanos // 10**9, nanos=nanos % 10**9)
        debug.last_check_time.CopyFrom(ended)
    return debug


def extra_bytes(session: Session | None, ranks: int) -> Sequence[int]:
    """Returns what ranks have said that staged weights take, by rank; 0 before they are whole."""
    staged = session.update.staged if session else None
    return [rank.extra_bytes for rank in staged.ranks] if staged else [0] * ranks


async def _memory(instance: Instance, session: Session | None) -> list[RankMemory]:
    workers = instance.ranks.workers
    told = extra_bytes(session, len(workers))

    def measure() -> list[RankMemory]:
        # The kernel knows nothing of what lies on a device: there the ranks' word counts.
        return [
            RankMemory(w.rank, resident_bytes(w.pid), staged_bytes(w.pid, fds[0]) or extra)
            for w, fds, extra in zip(workers, instance.ranks.descriptors, told, strict=False)
        ]

    return await asyncio.to_thread(measure)


def _session_to_proto(session: Session, turn: Turn) -> engine_pb2.UpdateSession:
    wanted = session.update.wanted
    return engine_pb2.UpdateSession(
        session=session.name, operator=session.operator, weight_version=wanted.version,
        source=str(wanted.source), phase=session.update.phase, age_seconds=session.age_seconds,
        lease_seconds=session.lease_left_seconds, waiting=turn.waiting,
    )  # fmt: skip
