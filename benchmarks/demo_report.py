"""What the demo saw → what it says: the report, the table, the verdict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table

VERSION = "v7"
"""Version that the seed's weights get, and that every target must end with."""


@dataclass
class Facts:
    """What was seen; `build/demo.json` in the making."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    text: dict[str, str] = field(default_factory=dict)
    digests: dict[str, list[str]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    addresses: dict[str, list[list[int]]] = field(default_factory=dict)
    seconds_to_ready: dict[str, float] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)


def judge(seen: Facts) -> dict[str, Any]:
    """Returns the report; every `*_equal` and `*_unchanged` is judged from what was seen."""
    seed_ids, target_ids = seen.tokens["seed"], seen.tokens["second"]
    return {
        "tokens_equal": len(seed_ids) > 0 and all(t == seed_ids for t in seen.tokens.values()),
        "seed_token_ids": seed_ids,
        "target_token_ids": target_ids,
        "text": seen.text["second"],
        "digests_equal": all(seen.digests["seed"])
        and all(d == seen.digests["seed"] for d in seen.digests.values()),
        "rank_digests": seen.digests["second"],
        "addresses_unchanged": all(len({*map(tuple, a)}) == 1 for a in seen.addresses.values())
        and len(seen.addresses["first"]) > 1,
        "versions_equal": set(seen.versions.values()) == {VERSION},
        "versions": seen.versions,
        "seconds_to_ready": seen.seconds_to_ready["second"],
        "seconds_to_ready_by_instance": seen.seconds_to_ready,
        **seen.figures,
    }


def show(report: dict[str, Any], console: Console) -> None:
    """Prints the table that a person likes to read."""
    mib = report["bytes_moved"] / (1 << 20)
    table = Table(title="Seedrelay: ready from a serving seed", show_header=False)
    for name, value in (
        ("answer", report["text"].strip().replace("\n", " ")),
        ("tokens on every instance equal", report["tokens_equal"]),
        ("digests on every rank equal", report["digests_equal"]),
        ("arena addresses unchanged", report["addresses_unchanged"]),
        ("weight version on every instance", ", ".join(sorted({*report["versions"].values()}))),
        ("moved to the second target", f"{mib:.0f} MiB over {report['transport']}"),
        ("weights by relay / from disk",
         f"{report['seconds_relay']:.2f} s / {report['seconds_disk_load']:.2f} s"),
        ("process start to ready", f"{report['seconds_to_ready']:.1f} s"),
        ("third target, other relay", f"over {report['transport_other_relay']}"),
        ("seed's tokens during the throttled pull", report["seed_tokens_during_relay"]),
        ("weight bytes that the target read from disk",
         report["target_weight_bytes_read_from_disk"]),
    ):  # fmt: skip
        verdict = "[green]yes[/]" if value else "[red]NO[/]"
        table.add_row(name, verdict if isinstance(value, bool) else str(value))
    console.print(table)


def holds(report: dict[str, Any]) -> bool:
    """Returns whether everything that is reported as equal is equal, and the job was done."""
    return (
        all(report[n] for n in ("tokens_equal", "digests_equal", "addresses_unchanged",
                                "versions_equal"))
        and report["bytes_moved"] > 0
        and report["seed_tokens_during_relay"] > 0
        and report["target_weight_bytes_read_from_disk"] < report["arena_bytes"] // 100
    )  # fmt: skip
