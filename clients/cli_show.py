"""Prints what commands have learned, for people or as JSON."""

from __future__ import annotations

import json
import sys
from typing import Any

from clients import fleet_table, report, report_debug, report_membership, report_relay
from clients.cli_run import say
from relay_service.core.match import Match
from seedrelay.v1 import engine_pb2, weights_pb2


def engine(status: engine_pb2.EngineStatus, *, as_json: bool) -> None:
    """Prints an engine's status."""
    shown = report.engine_status(status)
    if as_json:
        debug = {"debug": report_debug.debug(status.debug)} if status.HasField("debug") else {}
        say(json.dumps({**shown, **debug}))
        return
    say(f"{shown['instance']}  {shown['state']}  {shown['reason']}".rstrip())
    say(f"  model {shown['model']}, weights {shown['weight_version'] or '-'} "
        f"{shown['weights_digest'] or '(none)'}, epoch {shown['epoch']}")  # fmt: skip
    say(f"  running {shown['running']}, waiting {shown['waiting']}, "
        f"KV {shown['kv_blocks_used']}/{shown['kv_blocks_total']} blocks")  # fmt: skip
    if members := shown["membership"]:
        say(f"  {report_membership.line(members)}")
        if how_far := members["progress"]:
            say(f"  experts: {report_membership.progress_line(how_far)}")
    if closed := shown["pause"]:
        say(f"  gate closed for {closed['age_seconds']:.1f} s by {closed['operator']} "
            f"({closed['mode']}), {shown['waiting_at_gate']} requests wait at it")  # fmt: skip
    if how_far := shown["progress"]:
        say(f"  {how_far['phase']} {how_far['source_instance']}".rstrip() +
            f": {how_far['bytes_verified']}/{how_far['bytes_total']} bytes")  # fmt: skip
    if new := shown["update"]:
        how_much = f": {new['bytes_done']}/{new['bytes_total']} bytes" * bool(new["bytes_total"])
        say(f"  update: {new['phase']} {new['note']}".rstrip() + how_much)
    for rank in shown["ranks"]:
        say(f"  rank {rank['rank']}: process {rank['pid']}, {rank['arena_bytes']} bytes, "
            f"{rank['page_kind']} pages, {'sealed' if rank['sealed'] else 'open'}")  # fmt: skip
        for one in rank["load"]["conversions"] if rank["load"] else ():
            lossy = "lossy" if one["lossy"] else "exact"
            say(f"    {one['tensors']} tensors {one['source']} → {one['target']} ({lossy}), "
                f"first {one['example']}")  # fmt: skip


def relay(shown: dict[str, Any], *, as_json: bool) -> None:
    """Prints a relay's fleet, its transfers and what it keeps."""
    if as_json:
        say(json.dumps(shown))
        return
    say(fleet_table.head(shown))
    for one in shown["instances"]:
        say(f"  {one['instance']}  {one['state']}  {one['model']}  {fleet_table.weights(one)}  "
            f"{one['have_blocks']}/{one['blocks']} blocks at {one['address']}")  # fmt: skip
        for reader in one["readers"]:
            say(f"    read by {reader['instance']}: {reader['bytes_served']} bytes")
    for one in shown["transfers"]:
        say(f"  filling {one['instance']} from {' and '.join(fleet_table.sources(one))} over "
            f"{one['transport'] or '?'}: {one['bytes_verified']}/{one['bytes_total']} bytes, "
            f"{fleet_table.mib(one['bytes_per_second'])} MiB/s, {fleet_table.eta(one)} left, "
            f"again: {fleet_table.again(one)}")  # fmt: skip
    for one in shown["ended_transfers"]:
        say(f"  {one['instance']}: {one['outcome']} after {one['seconds']:.1f} s, again: "
            f"{fleet_table.again(one)}: {fleet_table.story(one)}")  # fmt: skip
    for one in shown["kept_arenas"]:
        say(f"  kept {one['instance']}  {one['weight_version']}  {one['arena_bytes']} bytes, "
            f"{one['seconds_left']:.0f} s yet")  # fmt: skip


def pull(done: weights_pb2.PullReport, *, as_json: bool) -> None:
    """Prints what a pull did."""
    shown = report.pull(done)
    if as_json:
        say(json.dumps(shown))
        return
    steps = ", then ".join(
        f"{s['source_instance']} ({s['reason']}{_cut_anew(s['recut'])})" for s in shown["path"]
    )
    say(f"{shown['state']}: {shown['bytes_moved']} bytes over {shown['transport']} from {steps}, "
        f"{shown['seconds_transfer']:.2f} s, weights {shown['weight_version']}")  # fmt: skip


def sources(matches: list[Match], *, as_json: bool) -> None:
    """Prints who could fill a target, and why the others could not."""
    if as_json:
        say(json.dumps({"sources": [report_relay.source(m) for m in matches]}))
        return
    for match in matches:
        version = fleet_table.weights(report_relay.instance(match.instance))
        verdict = f"does not fit: {match.reason}"
        if match.fits:
            verdict = "fits" + (
                f" if its weights can be cut anew: {match.recut}" * bool(match.recut)
            )
        say(f"{match.instance.instance}  {match.instance.state}  {version}  {verdict}")
    if not matches:
        say("no instances")


def forgotten(instance: str, *, as_json: bool) -> None:
    """Prints whose arena is kept no longer."""
    if as_json:
        say(json.dumps({"instance": instance}))
    else:
        say(f"the arena of {instance} is kept no longer")


def degraded() -> None:
    """Says on stderr that an answer is not what the whole model would have said."""
    print("degraded: experts were lost, others served in their place", file=sys.stderr)  # noqa: T201


def _cut_anew(how: str) -> str:
    return f"; cut anew: {how}" if how else ""
