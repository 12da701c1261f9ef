"""What does it cost a token that its answer must keep to a JSON Schema?

One real engine answers the same prompts in interleaved rounds, with and without a schema, one
at a time and several together; the gaps between the messages of a stream are measured:

    plain   any token may come
    schema  only what keeps to a schema of objects, strings, numbers and an enumeration

Before, the engine has made its tables for the tokenizer: `health_latency` says what that costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

from benchmarks import table
from benchmarks.seed_impact import ready
from clients.engine import EngineClient
from clients.launch import Service
from engine_service.checkpoint import random_llama, smollm2
from engine_service.checkpoint.random_shape import ShapeWish
from seedrelay.v1 import engine_pb2

COLUMNS = {"p50_ms": " p50 ms", "p99_ms": " p99 ms", "tokens_per_second": "tokens/s"}
BATCHES = (1, 8)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"}, "age": {"type": "integer"},
        "likes": {"type": "array", "items": {"enum": ["sea", "salt", "seeds"]}},
    },
    "required": ["name", "age", "likes"],
}  # fmt: skip
SCHEMA = json.dumps({"type": "array", "items": PERSON, "minItems": 1000})
"""No answer here is long enough to end."""


class Bench:
    """One engine and the rounds that it answers."""

    def __init__(self, engine: Service, tokens: int) -> None:
        self._engine = engine
        self._tokens = tokens

    def run(self, rounds: int) -> list[table.Row]:
        """Measures every case in every round; the first one warms up and does not count."""
        rows = []
        for number in range(rounds + 1):
            for batch in BATCHES:
                for name, schema in (("plain", ""), ("schema", SCHEMA)):
                    row = asyncio.run(self._measure(number, batch, schema))
                    rows.append({"method": f"{name} b{batch}", "round": number, **row})
                    said = f"{name} b{batch}, round {number} of {rounds}: {row['p50_ms']:.1f} ms"
                    print(said, file=sys.stderr)
        return [row for row in rows if row["round"]]

    async def _measure(self, number: int, batch: int, schema: str) -> table.Row:
        async with EngineClient(self._engine.address) as client:
            began = time.monotonic()
            streams = await asyncio.gather(
                *(self._stamps(client, 100 * number + one, schema) for one in range(batch))
            )
        gaps = [after - before for one in streams for before, after in pairwise(one)]
        return {
            "p50_ms": 1000 * statistics.median(gaps),
            "p99_ms": 1000 * statistics.quantiles(gaps, n=100, method="inclusive")[98],
            "tokens_per_second": sum(map(len, streams)) / (time.monotonic() - began),
        }

    async def _stamps(self, client: EngineClient, seed: int, schema: str) -> list[float]:
        """Returns when each token of an answer came."""
        request = engine_pb2.GenerateRequest(text="People of our village, as JSON: ")
        sampling = request.sampling
        sampling.max_tokens, sampling.temperature, sampling.seed = self._tokens, 0.8, seed
        sampling.ignore_eos = True
        if schema:
            sampling.structure.json_schema = schema
        stamps: list[float] = []
        async for message in client.generate(request):
            stamps += [time.monotonic()] * len(message.token_ids)
        if len(stamps) != self._tokens:
            raise SystemExit(f"an answer has {len(stamps)} tokens, not {self._tokens}")
        return stamps


def figures(rows: list[table.Row]) -> dict[str, float]:
    """Draws the figures from the rows: medians of the ratio of a round's medians."""
    return {
        f"schema_over_plain_b{batch}": table.median_ratio(
            rows, f"schema b{batch}", f"plain b{batch}", "p50_ms"
        )
        for batch in BATCHES
    }


def main() -> None:
    """Measures, prints the table, writes the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model, 1 round: a smoke test")
    parser.add_argument("--rounds", type=int, default=9, help="interleaved rounds")
    options = parser.parse_args()
    rounds, tokens = (1, 16) if options.quick else (options.rounds, 48)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as name:
        if options.quick:
            shape = ShapeWish(hidden_size=128, layers=4, vocab_size=4096).shape("float32")
            tiny = random_llama.RandomLlama(shape=shape, dtype="float32")
            model = random_llama.make(tiny, Path(name) / "tiny").path
        else:
            model = smollm2.fetch("bfloat16").path
        arguments = ["engine", "--model", str(model), "--listen", "127.0.0.1:0", "--threads", "1"]
        with Service(arguments, Path(name) / "log") as engine:
            asyncio.run(ready(engine))
            rows = Bench(engine, tokens).run(rounds)
    settings = {
        "model": model.name, "rounds": rounds, "tokens_per_answer": tokens, "threads": 1,
        "seconds_whole": time.monotonic() - began,
        "versions": table.versions("grpcio", "torch", "llguidance"),
    }  # fmt: skip
    title = "structure_cost_quick" if options.quick else "structure_cost"
    table.write(title, settings, rows, COLUMNS, figures(rows), {})


if __name__ == "__main__":
    main()
