"""How long from the death of a rank to the first correct token, and how many bytes does it take?

Real services on loopback: a random model with experts in four ranks (`--ep 4`), and the same
weights in another instance of two. In every round rank 1 is killed (SIGKILL) once in each way,
while an answer streams:

    spare rank, relay   a process that stood ready takes its place, and is filled from the other
                        instance: as it is by default
    new rank, relay     the same, with a process that is started then (`--spare-ranks 0`)
    spare slots, relay  the ranks that live have slots for replicas (`--redundant-experts`)
    spare rank, disk    a process that stood ready, filled from the model folder
    full reload, disk   policy `fail`: the whole instance starts again by itself and loads
    full reload, relay  the same as a dummy, which is filled from the other instance

Seconds are those to the first token of a request that is sent as soon as the rank is killed, and
sent again whenever it is refused; correct is an answer of the very tokens that came before. What
streams at the kill must end in the same tokens as well, where it goes on at all. All model files
are in the page cache. The least that could be pulled follows from the map of experts before the
kill and the sizes of the checkpoint's tensors alone.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmarks import page_cache, rank_loss, table
from benchmarks.moe_model import MoeModel, MoeShape, make
from clients.engine import EngineClient
from clients.launch import Service

RANKS, EXPERTS = 4, 16
REPLICAS = 8
"""Slots beyond one for each expert, so that three ranks have room for all."""
SHAPE = MoeShape(
    hidden_size=1024, layers=4, heads=16, kv_heads=4, head_dim=64, ffn_size=2688,
    vocab_size=16384, max_positions=2048, tied=True, experts=EXPERTS, top_k=2,
)  # fmt: skip
TINY = MoeShape(
    hidden_size=64, layers=2, heads=4, kv_heads=2, head_dim=16, ffn_size=96, vocab_size=512,
    max_positions=512, tied=True, experts=EXPERTS, top_k=2,
)  # fmt: skip
GOALS = {"bytes_over_minimum": "1.00", "full_reload_over_recovery": ">= 3"}
COLUMNS = {
    "seconds": "  token", "seconds_stream": " stream", **rank_loss.COLUMNS,
    "mib_pulled": "     MiB", "mib_minimum": "minimum",
}  # fmt: skip


@dataclass(frozen=True)
class Way:
    """How an instance comes back."""

    name: str
    arguments: tuple[str, ...]
    relay: bool = True
    lasts: bool = False
    """Whether the same instance serves all rounds; else each has a fresh one."""

    @property
    def spares(self) -> int:
        """How many processes stand ready to be ranks."""
        return int(self.recovers and "--spare-ranks" not in self.arguments)

    @property
    def recovers(self) -> bool:
        """Whether ranks that live go on."""
        return "recover" in self.arguments


_RECOVER = ("--on-rank-loss", "recover")
_NEW = (*_RECOVER, "--spare-ranks", "0")
_RESTART = ("--on-rank-death", "restart")
RECOVERY, RELOAD = "spare rank, relay", "full reload, disk"
WAYS = (
    Way(RECOVERY, _RECOVER, lasts=True),
    Way("new rank, relay", _NEW, lasts=True),
    Way("spare slots, relay", (*_RECOVER, "--redundant-experts", str(REPLICAS))),
    Way("spare rank, disk", _RECOVER, relay=False),
    Way(RELOAD, _RESTART, relay=False),
    Way("full reload, relay", (*_RESTART, "--load-format", "dummy")),
)


class Bench:
    """One model, its relay and the instance that has what is lost."""

    def __init__(self, model: MoeModel, folder: Path, stack: ExitStack) -> None:
        self._model, self._folder, self._stack = model, folder, stack
        self.model_bytes = page_cache.total_bytes(
            [file for file in model.files if file.suffix == ".safetensors"]
        )
        """Of all weights: what a whole instance gets, from wherever."""
        self._started = 0
        self._lasting: dict[tuple[str, ...], Service] = {}
        self._relay = stack.enter_context(
            Service(["relay", "--listen", "127.0.0.1:0"], folder / "relay.log")
        )
        self._other = stack.enter_context(self._engine(("--ep", "2", *self._attached)))

    async def run(self, number: int, way: Way) -> table.Row:
        """Kills a rank of an instance, and returns what followed."""
        await rank_loss.whole(self._other)
        with ExitStack() as round_only:
            engine = self._instance(way, round_only)
            await rank_loss.whole(engine)
            page_cache.warm(self._model.files)
            await rank_loss.quiet(engine.processes, 1 + RANKS + way.spares)
            minimum = await self._minimum(engine)
            loss = await rank_loss.lose(engine, rank_loss.VICTIM)
            await rank_loss.whole(engine)
            phases = rank_loss.phases(engine.log, loss.killed_at)
            pulled = phases.pop("bytes_pulled", 0) if way.recovers else self.model_bytes
        if way.recovers and not loss.stream_went_on:
            raise SystemExit(f"{way.name}: the stream did not go on")
        row = {
            "method": way.name, "round": number, "recovers": way.recovers,
            "seconds": loss.seconds, "seconds_stream": loss.seconds_stream,
            **{name: phases.get(name, loss.seconds) for name in rank_loss.COLUMNS},
            "bytes_pulled": pulled, "bytes_minimum": minimum,
            "mib_pulled": pulled / (1 << 20), "mib_minimum": minimum / (1 << 20),
        }  # fmt: skip
        print(f"{way.name}, round {number}: {row['seconds']:.2f} s", file=sys.stderr)
        return row

    async def _minimum(self, engine: Service) -> int:
        """Returns the bytes of experts that no rank but the victim holds."""
        async with EngineClient(engine.address) as client:
            layers = (await client.expert_map()).map.layers
        alone = 0
        for layer in layers:
            held = [set(group.experts) for group in layer.groups]
            others = set[int]().union(*held[: rank_loss.VICTIM], *held[rank_loss.VICTIM + 1 :])
            alone += len(held[rank_loss.VICTIM] - others)
        return alone * self._model.expert_bytes

    def _instance(self, way: Way, round_only: ExitStack) -> Service:
        arguments = ("--ep", str(RANKS), *way.arguments, *(self._attached if way.relay else ()))
        if not way.lasts:
            return round_only.enter_context(self._engine(arguments))
        if arguments not in self._lasting:
            self._lasting[arguments] = self._stack.enter_context(self._engine(arguments))
        return self._lasting[arguments]

    @property
    def _attached(self) -> tuple[str, ...]:
        return ("--relay", self._relay.address)

    def _engine(self, arguments: Sequence[str]) -> Service:
        self._started += 1
        return Service(
            ["engine", "--model", str(self._model.folder), "--listen", "127.0.0.1:0", *arguments,
             "--threads", "1", "--kv-cache-tokens", "2048", "--grace", "0", "--log-format", "json"],
            self._folder / f"engine-{self._started}.log",
        )  # fmt: skip


def figures(rows: list[table.Row]) -> dict[str, float]:
    """Draws the figures from the rows; of bytes the least favourable."""
    recovered = [row for row in rows if row["recovers"]]
    found = {
        "bytes_over_minimum": max(row["bytes_pulled"] / row["bytes_minimum"] for row in recovered),
        "full_reload_over_recovery": table.median_ratio(rows, RELOAD, RECOVERY, "seconds"),
    }
    for name in dict.fromkeys(row["method"] for row in rows):
        if name != RELOAD:
            ratio = table.median_ratio(rows, RELOAD, name, "seconds")
            found[f"full_reload_disk_over[{name}]"] = ratio
    return found


def main() -> None:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, 1 round: a smoke test")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", default="", help="part of the ways' names, such as disk")
    parser.add_argument("--logs", type=Path, help="folder that keeps the logs of the services")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ways = [way for way in WAYS if options.only in way.name or way.name in (RECOVERY, RELOAD)]
    rounds = 1 if options.quick else options.rounds
    rows: list[table.Row] = []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        model = make(TINY, Path(name) / "tiny") if options.quick else make(SHAPE)
        logs = options.logs or Path(name)
        logs.mkdir(parents=True, exist_ok=True)
        bench = Bench(model, logs, stack)
        for number in range(1, rounds + 1):
            turn = ways if number % 2 else ways[::-1]
            rows += [asyncio.run(bench.run(number, way)) for way in turn]
    settings = {
        "ranks": RANKS, "experts": EXPERTS, "replicas_in_spare_slots": REPLICAS, "rounds": rounds,
        "model_bytes": bench.model_bytes, "dtype": model.dtype, "threads": 1,
        "page_cache": "warm", "other_instance": "--ep 2", "transport": "auto",
    } | table.versions("torch")  # fmt: skip
    name = "expert_recovery_quick" if options.quick else "expert_recovery"
    table.write(name, settings, rows, COLUMNS, figures(rows), GOALS)


if __name__ == "__main__":
    main()
