"""A fleet as its directory shows it: who holds what, who reads from whom, and what came of it."""

import asyncio
import io
import json

import pytest
from fakes import eventually, instance, lay_out_bytes, random_bytes, transfer_state
from google.protobuf import duration_pb2
from rich.console import Console
from typer.testing import CliRunner

from clients import report_relay
from clients.cli import app
from clients.errors import CallFailed
from clients.fleet_table import tables
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.rpc import convert, convert_transfer
from relay_service.rpc.watching import news
from seedrelay.v1 import relay_pb2, weights_pb2

BLOCKS = 8


class Scene:
    """A seed at the directory, and a target at a relay of its own that is filled slowly."""

    def __init__(self, fleet) -> None:
        self.fleet = fleet
        fleet.layout = lay_out_bytes([BLOCKS * BLOCK_BYTES])
        fleet.data = random_bytes(fleet.layout)
        self.pulls = []

    async def start(self):
        """Starts the relays and attaches the engines."""
        self.directory = await self.fleet.relay()
        self.relay = await self.fleet.relay(join=self.directory.address)
        self.seed = await self.fleet.seed(self.directory)
        await self.fleet.dummy(self.relay)
        self.client = self.fleet.client(self.directory)
        return self

    def pull(self, rate: int = 4 * BLOCK_BYTES, **more):
        """Begins to fill the target."""
        client = self.fleet.client(self.relay)

        async def fill():
            options = weights_pb2.PullOptions(rate_limit_bytes_per_second=rate, **more)
            return [one async for one in client.pull("target", options)]

        self.pulls.append(asyncio.create_task(fill()))
        return self.pulls[-1]

    async def end(self) -> None:
        """Ends the pulls that run."""
        for pull in self.pulls:
            pull.cancel()
        await asyncio.gather(*self.pulls, return_exceptions=True)

    async def shown(self):
        """What `seedrelay status --json` shows of the directory."""
        return report_relay.status(await self.client.status())

    async def seen(self, field: str, **facts):
        """Waits until the directory shows a transfer with such facts; returns it."""
        found = []

        async def is_there() -> bool:
            found[:] = [one for one in (await self.shown())[field] if facts.items() <= one.items()]
            return bool(found)

        await eventually(is_there)
        return found[0]


@pytest.fixture
async def scene(fleet):
    """Started; ends what a test left."""
    scene = await Scene(fleet).start()
    yield scene
    await scene.end()


async def test_a_transfer_of_another_relay(scene):
    """The directory shows who reads from whom, how fast, and which blocks are there."""
    scene.pull()
    running = await scene.seen("transfers", source_instance="seed", phase="transferring")
    assert (running["instance"], running["address"]) == ("target", scene.relay.address)
    assert (running["transport"], running["outcome"]) == ("tcp", "")
    assert (running["blocks"], running["bytes_total"]) == (BLOCKS, BLOCKS * BLOCK_BYTES)
    assert [(s["source_instance"], s["reason"]) for s in running["path"]] == [("seed", "")]

    async def moves() -> bool:
        now = await scene.seen("transfers", transfer=running["transfer"])
        return (
            0 < now["blocks_verified"] < BLOCKS
            and now["bytes_per_second"] > 0
            and now["average_bytes_per_second"] > 0
            and now["seconds_remaining"] > 0
            and now["bytes_moved"] >= now["bytes_verified"]
        )

    await eventually(moves)
    holders = {one["instance"]: one for one in (await scene.shown())["instances"]}
    (reader,) = holders["seed"]["readers"]
    assert (reader["instance"], reader["transfer"]) == ("target", running["transfer"])
    assert holders["seed"]["load"] == 1
    coming = holders["target"]["filling"]
    assert (coming["source_instance"], coming["weight_version"]) == ("seed", "v1")
    assert coming["weights_digest"] == scene.seed.memory.digest
    assert (holders["target"]["state"], holders["target"]["weights_digest"]) == ("DUMMY", "")
    assert holders["seed"]["filling"] is None


async def test_a_transfer_that_has_ended(scene):
    """It is shown as ended, with what came of it; only those that run are called transfers."""
    scene.pull(0)
    done = await scene.seen("ended_transfers", outcome="complete")
    assert (await scene.shown())["transfers"] == []
    assert (done["blocks_verified"], done["bytes_reread"], done["blocks_failed"]) == (BLOCKS, 0, 0)
    assert [step["reason"] for step in done["path"]] == ["complete"]
    assert (done["bytes_per_second"], done["seconds_remaining"]) == (0, None)


async def test_a_transfer_that_failed(scene):
    """Blocks that were wrong, what was read again, and why each source was left are shown."""
    scene.seed.memory.arenas[0].land(0, memoryview(bytes(BLOCK_BYTES)))
    scene.pull(0)
    failed = await scene.seen("ended_transfers", outcome="CorruptBlock")
    assert failed["blocks_failed"] >= 2
    assert failed["bytes_reread"] >= failed["blocks_failed"] * BLOCK_BYTES
    assert "do not match their digest" in failed["path"][-1]["reason"]
    assert "do not match their digest" in failed["note"]


async def test_a_transfer_that_found_nobody(scene):
    """What ended it is shown in its own words, not what it noticed last."""
    timeout = duration_pb2.Duration(nanos=200_000_000)
    scene.pull(source_instance="nobody", timeout=timeout)
    ended = await scene.seen("ended_transfers", outcome="PullTimeout")
    assert ended["note"] == "not filled within 0.2 s: waiting for nobody"
    assert ended["path"] == []


async def test_transfers_go_with_their_relay(scene):
    """A relay that ends takes its transfers along; that of a silent one expires."""
    scene.pull()
    await scene.seen("transfers", source_instance="seed")
    await scene.end()
    await scene.fleet.stop(scene.relay)

    async def nothing_runs() -> bool:
        now = await scene.shown()
        return not now["transfers"] and not now["ended_transfers"]

    await eventually(nothing_runs)


# Watching


async def test_watching_a_fleet(scene):
    """News come when a transfer begins and when it ends, whatever the interval."""
    watched = scene.client.watch_transfers(interval_seconds=3600)
    assert not (await anext(watched)).transfers
    scene.pull()

    async def until(outcome: str):
        async for message in watched:
            for one in (*message.transfers, *message.ended_transfers):
                if one.outcome == outcome and one.address == scene.relay.address:
                    return one
        raise AssertionError

    async with asyncio.timeout(20):
        assert (await until("")).instance == "target"
        assert (await until("complete")).blocks_verified == BLOCKS
    await watched.aclose()


async def test_watching_while_nothing_happens(scene):
    """At every interval the transfers are told again."""
    watched = scene.client.watch_transfers(interval_seconds=0.1)
    async with asyncio.timeout(20):
        told = [await anext(watched) for _ in range(3)]
    assert told == told[:1] * 3
    await watched.aclose()


async def test_watching_one_relay(scene):
    """Those of others can be left out."""
    scene.pull()
    await scene.seen("transfers", source_instance="seed")
    own = scene.client.watch_transfers(own_only=True)
    assert not (await anext(own)).transfers
    await own.aclose()
    target = scene.fleet.client(scene.relay).watch_transfers(own_only=True)
    assert [one.instance for one in (await anext(target)).transfers] == ["target"]
    await target.aclose()


async def test_watching_too_closely(scene):
    """An interval that is shorter than the looks is refused."""
    with pytest.raises(CallFailed) as refused:
        await anext(scene.client.watch_transfers(interval_seconds=0.01))
    assert (refused.value.code, refused.value.details["field"]) == ("INVALID_ARGUMENT", "interval")


async def test_who_reads_slowly_gets_the_newest():
    """Nothing is kept for a slow reader: the next one it gets is of that moment."""
    looks = 0

    def look():
        nonlocal looks
        looks += 1
        return [transfer_state(f"t{looks}")]

    watched = news(look, 0.1)
    assert [t.transfer for t in await anext(watched)] == ["t1"]
    for number in range(100):
        looks = number * 1000
    assert [t.transfer for t in await anext(watched)] == [f"t{looks}"]
    await watched.aclose()
    assert looks < 99_010


async def test_a_watcher_that_leaves(scene):
    """Its stream ends with it: nothing goes on looking on its behalf."""
    watched = scene.client.watch_transfers()
    await anext(watched)
    running = {task for task in asyncio.all_tasks() if "WatchTransfers" in repr(task.get_coro())}
    await watched.aclose()
    await eventually(lambda: all(task.done() for task in running))


# The command


async def seedrelay(*arguments: str):
    """Runs a command beside the relays' event loop."""
    return await asyncio.to_thread(CliRunner().invoke, app, arguments)


async def test_the_status_command(scene):
    """People read who is filled, by whom and how far; scripts read one object."""
    scene.pull()
    await scene.seen("transfers", source_instance="seed", phase="transferring")
    shown = await seedrelay("status", scene.directory.address)
    assert shown.exit_code == 0, shown.output
    assert "  target  DUMMY  tiny  filling: v1 from seed" in shown.stdout
    assert "    read by target: " in shown.stdout
    assert "  filling target from seed over tcp: " in shown.stdout
    listed = json.loads((await seedrelay("status", scene.relay.address, "--json")).stdout)
    assert listed["directories"] == [{"address": scene.directory.address, "reachable": True}]
    assert [one["instance"] for one in listed["transfers"]] == ["target"]


async def test_watching_a_relay_that_ends(scene):
    """The command says that nobody answers any more, with the exit code for it."""
    watching = asyncio.create_task(seedrelay("status", scene.relay.address, "--watch", "--json"))
    transfers, asked = scene.relay._fleet.transfers, []

    def told(**how):
        if not how:  # asked for the whole status: what came before has been printed by then
            asked.append(how)
        return transfers(**how)

    scene.relay._fleet.transfers = told
    await eventually(lambda: len(asked) > 1)
    await scene.fleet.stop(scene.relay)
    async with asyncio.timeout(20):
        done = await watching
    *shown, error = map(json.loads, done.stdout.splitlines())
    assert shown[0]["instances"]
    assert (done.exit_code, error["error"]["code"]) == (3, "UNAVAILABLE")


def test_a_table():
    """Every column of the live table, and nothing in it that others could control it by."""
    evil = instance("\x1b[2Jevil[bold]")
    fleet = relay_pb2.GetRelayStatusResponse(
        address="here:1",
        instances=[convert.instance_to_proto(evil)],
        transfers=[convert_transfer.to_proto(transfer_state())],
        ended_transfers=[convert_transfer.to_proto(transfer_state("t2", outcome="NoSource"))],
        directories=[relay_pb2.Directory(address="there:1")],
    )
    drawn = io.StringIO()
    Console(width=200, file=drawn).print(tables(report_relay.status(fleet)))
    text = drawn.getvalue()
    assert "\x1b[2J" not in text
    for words in (
        "evil[bold]", "there:1 (does not answer)", "1/4", "3 s", "1 MiB, 1 wrong", "NoSource",
        "dead (tcp): gone",
    ):  # fmt: skip
        assert words in text, text
