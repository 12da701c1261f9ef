"""`seedrelay experts` and what `status` says of ranks, against an engine without a model."""

import asyncio
import json

import pytest
from experts import REPORT, ROUTED, SPREAD, STEPS
from typer.testing import CliRunner

from clients.cli import app
from engine_service.core.membership import RecoverOptions
from engine_service.core.recovery_tally import Change
from engine_service.errors import RecoveryFailed

MEMBERSHIP_LINE = (
    "membership 2: ROUTED, 2 ranks in 1 group, 1 group lost, "
    "2 experts lost in 2 layers: rank 2 was killed"
)


async def seedrelay(*line: str):
    """Runs a command beside the engine's event loop."""
    return await asyncio.to_thread(CliRunner().invoke, app, list(line))


async def test_the_table(lost):
    """Who lives stands above; a line for each group, and one for what nobody holds."""
    done = await seedrelay("experts", "show", lost.address)
    assert (done.exit_code, done.stdout.splitlines()) == (0, [
        MEMBERSHIP_LINE,
        "layer    ranks  experts (* also elsewhere)",
        "    1      0-1  0 1 2", "    1   nobody  3",
        "    2      0-1  0 1 2", "    2   nobody  3",
    ])  # fmt: skip
    lost.instance.recovery.progress = STEPS[-1]
    shown = json.loads((await seedrelay("experts", "show", lost.address, "--json")).stdout)
    assert shown["membership"] == {
        "epoch": 2, "state": "ROUTED", "groups_lost": 1, "lost": {"1": [3], "2": [3]},
        "members": [{"rank": m.rank, "group": m.group, "pid": m.pid} for m in ROUTED.members],
        "reason": "rank 2 was killed", "on_rank_loss": "fail",
        "progress": {"phase": "pulling", "bytes_done": 64, "bytes_total": 128, "source": "seed",
                     "note": "slow"},
    }  # fmt: skip
    assert (shown["layers"]["1"], shown["digests"]["1"][3]) == ([[0, 1, 2]], "")
    status = await seedrelay("status", lost.address)
    assert "  membership 2: ROUTED, 2 ranks in 1 group, 1 group lost" in status.stdout
    assert "  experts: pulling from seed: 64/128 bytes (slow)" in status.stdout
    status = json.loads((await seedrelay("status", lost.address, "--json")).stdout)
    assert status["membership"] == shown["membership"]


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        (("recover",), RecoverOptions()),
        (("recover", "--replace", "--from", "disk"), RecoverOptions(replace=True, source="disk")),
        (("scale", "--ep", "3"), 3),
    ],
)
async def test_commands(lost, line, asked):
    """Words and JSON say what was done, and where the experts lie then; progress is on stderr."""
    command, *options = line
    done = await seedrelay("experts", command, lost.address, *options)
    assert done.exit_code == 0, done.output
    assert lost.instance.recovery.asked == [asked]
    assert "2 units and 124 bytes came from outside, 512 bytes from other ranks" in done.stdout
    assert "  layer.2.expert.3 part 1: 60 bytes from disk:/models/m" in done.stdout
    assert "membership 3: WHOLE, 4 ranks in 2 groups\nlayer" in done.stdout
    assert done.stdout.endswith("    2      2-3  3 0* 1*\n")
    assert "planning" in done.stderr
    done = await seedrelay("experts", command, lost.address, *options, "--json")
    shown = json.loads(done.stdout)
    assert (done.exit_code, shown["bytes_pulled"], shown["bytes_copied"]) == (0, 124, 512)
    assert shown["pulled"][0] == {
        "unit": "layer.1.expert.3", "part": 0, "bytes": 64, "source": "relay:seed",
    }  # fmt: skip
    assert shown["membership"]["epoch"] == 3
    assert shown["weights_digest"] == lost.instance.engine.weights.digest
    assert shown["layers"]["2"] == [*map(list, SPREAD)]


async def test_exit_codes(lost):
    """Refused is 1 with the reason, wrong usage 2, unreachable 3, too late 4."""
    recovery = lost.instance.recovery
    recovery.error = RecoveryFailed("nobody has it", hint="start an instance")
    for command in (("recover", lost.address), ("scale", lost.address, "--ep", "2")):
        refused = await seedrelay("experts", *command, "--json")
        error = json.loads(refused.stdout)["error"]
        assert (refused.exit_code, error["code"]) == (1, "UNAVAILABLE")
        assert "nobody has it" in refused.stderr
        assert "hint: start an instance" in refused.stderr
    assert (await seedrelay("experts", "scale", lost.address)).exit_code == 2
    assert (await seedrelay("experts", "scale", lost.address, "--ep", "0")).exit_code == 2
    assert (await seedrelay("experts", "recover", "127.0.0.1:1")).exit_code == 3
    recovery.may_end.clear()
    late = await seedrelay("experts", "recover", lost.address, "--deadline", "0.2")
    assert late.exit_code == 4
    recovery.error = None
    recovery.may_end.set()


async def test_what_was_done_last(lost):
    """It can be seen later, and by others than who asked for it."""
    before = json.loads((await seedrelay("experts", "show", lost.address, "--json")).stdout)
    lost.instance.recoveries.ended(Change.RECOVER, REPORT)
    lost.instance.recoveries.ended(Change.SCALE, None)
    after = json.loads((await seedrelay("experts", "show", lost.address, "--json")).stdout)
    assert (before["last_report"], after["last_report"]["bytes_pulled"]) == (None, 124)
    assert [one["unit"] for one in after["last_report"]["pulled"]] == [
        u.unit for u in REPORT.pulled
    ]
    shown = (await seedrelay("experts", "show", lost.address)).stdout
    assert "\nlast change: 2 units and 124 bytes came from outside, 512 bytes" in shown
