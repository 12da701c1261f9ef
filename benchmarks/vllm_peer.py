"""vLLM as a peer: a process of another environment, spoken to in lines of JSON."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Self

from benchmarks import table

READY_SECONDS = 600.0
_PROGRAM = """
import json, os, sys, time
said = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)  # whatever else is printed goes to the log
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, dtype = sys.argv[1:]
    llm = LLM(model=model, dtype=dtype, max_model_len=2048, max_num_seqs=32,
              max_num_batched_tokens=4096, enable_prefix_caching=False)
    engine, number = llm.llm_engine, 0

    def generate(prompts, tokens):
        global number
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
        stamps, began = {}, time.perf_counter()
        for prompt in prompts:
            number += 1
            stamps[str(number)] = []
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for output in engine.step():
                seen = stamps[output.request_id.split("-")[0]]
                fresh = len(output.outputs[0].token_ids) - len(seen)
                seen += [time.perf_counter() - began] * fresh
        return list(stamps.values())

    generate([[1] * 16], 1)
    print("ready", file=said)
    for line in sys.stdin:
        print(json.dumps(generate(*json.loads(line))), file=said)
"""


class VllmPeer:
    """vLLM's engine with its own processes, as it is started by default."""

    name = "vllm"

    def __init__(self, python: str, model: Path, dtype: str, log: Path) -> None:
        began = time.monotonic()
        program = log.with_name("be_peer.py")  # not a name that it imports
        program.write_text(_PROGRAM, encoding="utf-8")
        cores = f"0-{(os.cpu_count() or 1) - 1}"
        environment = {
            **os.environ, "VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "WARNING", "PYTHONPATH": "",
        }  # fmt: skip
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [python, str(program), str(model), dtype],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                env=environment,
            )  # fmt: skip
        self.pid = self._process.pid
        if self._line() != "ready":
            self._process.kill()
            raise SystemExit(f"vLLM does not come up:\n{log.read_text(errors='replace')[-2000:]}")
        self.seconds_to_first_token = time.monotonic() - began

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        table.signal_tree(self.pid, signal.SIGCONT)
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def generate(self, prompts: list[list[int]], tokens: int) -> list[list[float]]:
        """Generates exactly so many tokens for each prompt."""
        if self._process.stdin is None:
            raise SystemExit("vLLM has ended")
        print(json.dumps([prompts, tokens]), file=self._process.stdin, flush=True)
        stamps: list[list[float]] = json.loads(self._line())
        return stamps

    def _line(self) -> str:
        return self._process.stdout.readline().strip() if self._process.stdout else ""
