"""A fleet as tables: who holds what, and who reads from whom, how fast."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

_MIB = 1 << 20
Shown = dict[str, Any]
"""An object of `report_relay`."""


def tables(fleet: Shown) -> RenderableType:
    """Draws the status of a relay."""
    parts: list[RenderableType] = [Text(head(fleet))]
    parts.append(_table(
        ["instance", "state", "model", "weights", "blocks", "readers", "relay"],
        ([i["instance"], i["state"], i["model"], weights(i), f"{i['have_blocks']}/{i['blocks']}",
          " ".join(r["instance"] for r in i["readers"]), i["address"]]
         for i in fleet["instances"]),
    ))  # fmt: skip
    if fleet["transfers"]:
        parts.append(_table(
            ["target", "from", "over", "blocks", "MiB/s", "average", "left", "again", "note"],
            ([t["instance"], " ".join(sources(t)), t["transport"],
              f"{t['blocks_verified']}/{t['blocks']}", mib(t["bytes_per_second"]),
              mib(t["average_bytes_per_second"]), eta(t), again(t), t["note"]]
             for t in fleet["transfers"]),
        ))  # fmt: skip
    if fleet["ended_transfers"]:
        parts.append(_table(
            ["ended", "outcome", "blocks", "average", "seconds", "again", "sources"],
            ([t["instance"], t["outcome"], f"{t['blocks_verified']}/{t['blocks']}",
              mib(t["average_bytes_per_second"]), f"{t['seconds']:.1f}", again(t), story(t)]
             for t in fleet["ended_transfers"]),
        ))  # fmt: skip
    return Group(*parts)


def head(fleet: Shown) -> str:
    """Says which relay it is, and which of its directories answer."""
    named = [
        one["address"] + ("" if one["reachable"] else " (does not answer)")
        for one in fleet["directories"]
    ]
    return f"relay {fleet['address']}, directory {', '.join(named) or 'itself'}"


def weights(instance: Shown) -> str:
    """Says which weights an instance holds, or is being filled with and from whom."""
    if instance["filling"] and not instance["weights_digest"]:
        coming = instance["filling"]
        return f"filling: {coming['weight_version'] or '-'} from {coming['source_instance']}"
    return instance["weight_version"] or "-"


def sources(transfer: Shown) -> list[str]:
    """Names those that a transfer reads from."""
    in_use = [step["source_instance"] for step in transfer["path"] if not step["reason"]]
    return in_use or ["?"]


def story(transfer: Shown) -> str:
    """Tells which sources were tried, and why each was left."""
    steps = [f"{s['source_instance']} ({s['transport'] or 'no transport'}): {s['reason'] or 'cut'}"
             for s in transfer["path"]]  # fmt: skip
    return "; ".join(steps) or transfer["note"]


def again(transfer: Shown) -> str:
    """Says what had to be read again, and how many blocks were wrong."""
    return f"{transfer['bytes_reread'] / _MIB:.0f} MiB, {transfer['blocks_failed']} wrong"


def eta(transfer: Shown) -> str:
    """Says how long it still takes."""
    seconds = transfer["seconds_remaining"]
    return "?" if seconds is None else f"{seconds:.0f} s"


def mib(nbytes: int) -> str:
    """Writes bytes as MiB."""
    return f"{nbytes / _MIB:.1f}"


def _table(columns: list[str], rows: Iterable[list[str]]) -> Table:
    table = Table(*columns, box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for row in rows:
        # What others call themselves must not move the cursor, or pass for markup.
        table.add_row(*(Text("".join(filter(str.isprintable, cell))) for cell in row))
    return table
