"""Where experts lie, as a table for people."""

from __future__ import annotations

from collections import Counter

from clients import report_membership
from clients.cli_run import say
from seedrelay.v1 import engine_pb2


def show(shown: engine_pb2.ExpertMap, membership: engine_pb2.Membership | None = None) -> None:
    """Prints who computes together, and a line per layer and group of ranks; lost ones last."""
    if membership and (members := report_membership.membership(membership)):
        say(report_membership.line(members))
        if how_far := members["progress"]:
            say(report_membership.progress_line(how_far))
    parts = shown.placement.tensor_parallel_size
    say(f"{'layer':>5}  {'ranks':>7}  experts (* also elsewhere)")
    for layer in shown.layers:
        replicas = Counter(expert for group in layer.groups for expert in group.experts)
        for number, group in enumerate(layer.groups):
            first, last = number * parts, (number + 1) * parts - 1
            ranks = str(first) if first == last else f"{first}-{last}"
            held = " ".join(f"{e}{'*' if replicas[e] > 1 else ''}" for e in group.experts)
            say(f"{layer.layer:>5}  {ranks:>7}  {held}")
        if lost := [str(e) for e in range(shown.expert_count) if e not in replicas]:
            say(f"{layer.layer:>5}  {'nobody':>7}  {' '.join(lost)}")
