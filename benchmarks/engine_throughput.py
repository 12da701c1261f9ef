"""How fast does the engine generate, beside others on the same model and the same machine?

Same model, dtype, prompts and compute threads; one engine works at a time, the others are
stopped meanwhile (some poll), in interleaved rounds with fresh random prompts:

    seedrelay      a real engine process, measured by a client over gRPC, which gets a message
                   per token, or one per 16; its decode layer was compiled before it started
    transformers   `generate` of the library, one batch
    vllm           vLLM's engine, where `--vllm-python` names an environment that has it

Steady decode counts the tokens after the last answer got its first one, until the first
answer ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from benchmarks import table
from benchmarks.decode_peers import (
    Ours,
    Peer,
    Prompts,
    Stamps,
    be_reader,
    be_transformers,
    weight_bytes,
)
from benchmarks.seed_impact import ready
from benchmarks.vllm_peer import VllmPeer
from clients.launch import Service
from engine_service.checkpoint import random_llama, smollm2
from engine_service.checkpoint.random_shape import ShapeWish

GOALS = {
    "decode_over_vllm_cpu_b1": ">= 1.05", "decode_over_vllm_cpu_b8": ">= 0.95",
    "decode_over_vllm_cpu_b32": ">= 0.95", "decode_over_transformers_b8": ">= 1.35",
    "decode_over_bandwidth_limit_b1": ">= 0.35", "start_to_first_token_over_vllm": "<= 0.2",
}  # fmt: skip
COLUMNS = {
    "tokens_per_second": "tokens/s", "first_token_ms": "first ms",
    "p50_ms": "p50 ms", "p99_ms": "p99 ms",
}  # fmt: skip
BATCHES = (1, 8, 32)
TOKENS = 64
MESSAGE_TOKENS = 16
"""Tokens of a message where a caller does not want each of them at once."""
LONG_ROUNDS = 3
"""Rounds at a context of 1024, which no goal is about."""
VOCABULARY = 4000
"""Prompts are of token ids below it: every model here has so many."""


class Bench:
    """Engines that are up, and the cases that each of them gets."""

    def __init__(self, engines: list[Ours | Peer | VllmPeer], rounds: int) -> None:
        self._engines = engines
        self._rounds = rounds
        self._random = random.Random(7)  # noqa: S311 (prompts, not secrets)
        self.rows: list[table.Row] = []

    def run(
        self, name: str, batch: int, context: int, tokens: int = TOKENS, rounds: int = 0
    ) -> None:
        """Measures a case in interleaved rounds; a first one warms up and does not count."""
        for number in range(min(self._rounds, rounds or self._rounds) + 1):
            for engine in self._engines:
                prompts = self._prompts(batch, context - tokens // 2)
                with table.alone(engine.pid, [other.pid for other in self._engines]):
                    stamps = engine.generate(prompts, tokens)
                if number:
                    row = {"method": f"{engine.name} {name}", "round": number, **_judge(stamps)}
                    self.rows.append(row)
                    said = f"{row['method']}, round {number}: {row['tokens_per_second']:.1f}"
                    print(f"{said} tokens/s", file=sys.stderr)

    def prefix(self, context: int) -> None:
        """Measures our first token for a long prompt, fresh and seen before."""
        ours = self._engines[0]
        for number in range(self._rounds + 1):
            prompts = self._prompts(1, context)
            for method in ("seedrelay prompt fresh", "seedrelay prompt seen"):
                with table.alone(ours.pid, [other.pid for other in self._engines]):
                    stamps = ours.generate(prompts, 8)
                row = {"method": method, "round": number, **_judge(stamps)}
                if number:
                    self.rows.append(row)

    def _prompts(self, batch: int, length: int) -> Prompts:
        return [
            [self._random.randrange(10, VOCABULARY) for _ in range(length)] for _ in range(batch)
        ]


def _judge(stamps: Stamps) -> table.Row:
    begin = max(one[0] for one in stamps)
    gaps = [after - before for one in stamps for before, after in pairwise(one) if before >= begin]
    return {
        "tokens_per_second": sum(_rate(one, begin) for one in stamps),
        "first_token_ms": 1000 * stamps[0][0],
        "p50_ms": 1000 * statistics.median(gaps),
        "p99_ms": 1000 * statistics.quantiles(gaps, n=100)[98] if len(gaps) > 1 else 0.0,
    }


def _rate(stamps: list[float], begin: float) -> float:
    """Tokens per second of one answer, in whole messages since all have begun."""
    since = max(stamp for stamp in stamps if stamp <= begin)
    return sum(stamp > since for stamp in stamps) / (stamps[-1] - since)


def compare(model: Path, options: argparse.Namespace, folder: Path) -> tuple[list[table.Row], dict]:
    """Starts everything, measures, ends everything; returns the rows and what they allow."""
    with contextlib.ExitStack() as stack:
        arguments = [
            "engine", "--model", str(model), "--listen", "127.0.0.1:0",
            "--threads", str(options.threads), "--kv-cache-tokens", "40000",
        ]  # fmt: skip
        compiled = {} if options.quick else compile_layer(model, options)
        began = time.monotonic()
        engine = stack.enter_context(Service(arguments, folder / "engine.log"))
        asyncio.run(ready(engine))
        ours = Ours(engine)
        ours.generate([[1] * 16], 1)
        starts = {"seedrelay": time.monotonic() - began}
        pid, pipe, _ = stack.enter_context(
            table.peer(be_transformers, str(model), options.dtype, options.threads)
        )
        engines: list[Ours | Peer | VllmPeer] = [
            ours, Ours(engine, MESSAGE_TOKENS), Peer("transformers", pid, pipe)
        ]  # fmt: skip
        if options.vllm_python:
            vllm = VllmPeer(options.vllm_python, model, options.dtype, folder / "vllm.log")
            engines.append(stack.enter_context(vllm))
            starts["vllm"] = vllm.seconds_to_first_token
        _, reader, _ = stack.enter_context(table.peer(be_reader, options.threads))
        bench = Bench(engines, options.rounds)
        for batch in options.batches:
            bench.run(f"b{batch}", batch, 128)
        if not options.quick:
            bench.run("b8 at 1024", 8, 1024, rounds=LONG_ROUNDS)
        bench.run("first token of 512", 1, 512, 8)
        bench.prefix(1024)
        read = []
        for _ in range(9):
            reader.send("read")
            read.append(reader.recv())
    return bench.rows, {
        "bytes_per_second": statistics.median(read), "starts": starts, "compiled": compiled
    }  # fmt: skip


def compile_layer(model: Path, options: argparse.Namespace) -> dict:
    """Makes the decode layer that the engine then finds, unless the machine has it."""
    command = [
        sys.executable, "-m", "clients", "model", "compile", str(model),
        "--threads", str(options.threads), "--json",
    ]  # fmt: skip
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def figures(rows: list[table.Row], model: Path, found: dict) -> dict[str, float]:
    """Draws the figures from the rows."""
    methods = {row["method"] for row in rows}
    drawn = {}
    for peer, label in (("vllm", "vllm_cpu"), ("transformers", "transformers")):
        for batch in BATCHES:
            pair = f"seedrelay b{batch}", f"{peer} b{batch}"
            if methods.issuperset(pair):
                ratio = table.median_ratio(rows, *pair, "tokens_per_second")
                drawn[f"decode_over_{label}_b{batch}"] = ratio
                pair = f"seedrelay by {MESSAGE_TOKENS} b{batch}", pair[1]
                ratio = table.median_ratio(rows, *pair, "tokens_per_second")
                drawn[f"decode_by_{MESSAGE_TOKENS}_over_{label}_b{batch}"] = ratio
    limit = found["bytes_per_second"] / weight_bytes(model)
    decode = table.median(rows, "seedrelay b1", "tokens_per_second")
    drawn["decode_over_bandwidth_limit_b1"] = decode / limit
    drawn["prefix_hit_first_token_over_fresh"] = table.median_ratio(
        rows, "seedrelay prompt seen", "seedrelay prompt fresh", "first_token_ms"
    )
    drawn["first_token_over_transformers"] = table.median_ratio(
        rows, "seedrelay first token of 512", "transformers first token of 512", "first_token_ms"
    )
    starts = found["starts"]
    if "vllm" in starts:
        drawn["start_to_first_token_over_vllm"] = starts["seedrelay"] / starts["vllm"]
    return drawn


def main() -> None:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, 1 round: a smoke test")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each engine")
    parser.add_argument("--vllm-python", default="", help="Python of an environment with vLLM")
    options = parser.parse_args()
    options.rounds = 1 if options.quick else options.rounds
    options.batches = (1, 8) if options.quick else BATCHES
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.quick:
            shape = ShapeWish(hidden_size=128, layers=4, vocab_size=4096).shape(options.dtype)
            tiny = random_llama.RandomLlama(shape=shape, dtype=options.dtype)
            model = random_llama.make(tiny, folder / "tiny").path
        else:
            model = smollm2.fetch(options.dtype).path
        rows, found = compare(model, options, folder)
        drawn = figures(rows, model, found)
    settings = {
        "model": model.name, "dtype": options.dtype, "threads": options.threads,
        "rounds": options.rounds, "tokens_per_answer": TOKENS,
        "context": "mean of prompt and half of the answer: 128 unless the method says else",
        "decode": "of the whole batch, by the client's clock",
        "memory_bytes_per_second": found["bytes_per_second"],
        "start_to_first_token_seconds": found["starts"], "layer": found["compiled"],
        "seconds_whole": time.monotonic() - began,
        "versions": table.versions("grpcio", "torch", "transformers"),
    }  # fmt: skip
    title = "engine_throughput_quick" if options.quick else "engine_throughput"
    table.write(title, settings, rows, COLUMNS, drawn, GOALS)


if __name__ == "__main__":
    main()
