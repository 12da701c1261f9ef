"""What does not fit, is missing or is broken is refused in words, and never served."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from stage import (
    DUMMY,
    Fleet,
    Result,
    Stage,
    answer,
    health,
    reach,
    refusal,
    request,
    seedrelay,
    status_of,
)

from clients.launch import LaunchError, Service
from seedrelay.v1 import engine_pb2


async def _pull(target: Service, relay: Service, *more: str) -> Result:
    return await asyncio.to_thread(
        seedrelay, "pull", "--engine", target.address, "--relay", relay.address, "--json", *more
    )


@pytest.mark.parametrize(
    ("wish", "arguments", "words"),
    [
        ({}, ("--dtype", "bfloat16"), "dtype: seed float32, target bfloat16"),
        ({"layers": 3}, (), "seed 4, target 3"),
        ({}, ("--weight-format", "fp8"), "weight_format: seed plain/1, target fp8/1"),
    ],
)
async def test_other_format_is_refused_before_a_byte_moves(
    stage: Stage,
    fleet: Fleet,
    make_model: Callable[..., Path],
    wish: dict[str, int],
    arguments: tuple[str, ...],
    words: str,
) -> None:
    """A target of another dtype or model is refused with the first difference in words."""
    shape = {"hidden_size": 128, "layers": 4, "vocab_size": 4096, **wish}
    other = make_model("other" if wish else "tiny", **shape)
    relay = fleet.relay
    target = stage.engine(other, "--load-format", "dummy", *arguments)
    await reach(target, DUMMY)
    refused = await _pull(target, relay)
    assert refused.status == 1
    assert words in refused.err
    assert refused.json()["error"]["code"] == "FAILED_PRECONDITION"
    listed = await asyncio.to_thread(
        seedrelay, "sources", "--relay", relay.address, "--for", target.address, "--json"
    )
    (source,) = [s for s in listed.json()["sources"] if s["instance"] == "seed"]
    assert not source["fits"]
    assert words in source["reason"]
    assert (await status_of(target)).state == DUMMY
    assert (await refusal(target, request())).code == "UNAVAILABLE"


async def test_misfit_fails_at_start(stage: Stage, fleet: Fleet, model: Path) -> None:
    """A target that fills itself and fits no seed exits with the difference."""
    target = stage.target(fleet.relay, "--dtype", "bfloat16", model=model)
    assert target.wait() == 1
    assert "dtype: seed float32, target bfloat16" in target.log_tail()


async def test_no_source_within_the_deadline(stage: Stage, model: Path) -> None:
    """A deadline without a source ends in a clear error, or with a fallback on the disk."""
    relay = stage.relay()
    lost = stage.target(relay, "--deadline", "3", model=model)
    saved = stage.target(
        relay, "--deadline", "3", "--fallback", "disk", "--weight-version", "v3", model=model
    )
    nothing = stage.target(stage.relay(), "--deadline", "3")  # nobody offers a model there
    status = await reach(saved)
    assert status.weight_version == "v3"
    assert status.weights_digest
    assert len(await answer(saved)) == 16
    assert lost.wait() == 1
    assert "not filled within" in lost.log_tail()
    assert nothing.wait() == 1
    assert "not filled within 3 s of its start: no model was offered" in nothing.log_tail()


async def test_several_models_on_offer(
    stage: Stage, model: Path, make_model: Callable[..., Path]
) -> None:
    """An empty target takes the model that is named, or fails with the list."""
    other = make_model("second", hidden_size=64, layers=2)
    relay = stage.relay()
    seeds = [
        stage.engine(model, "--relay", relay.address, "--instance-name", "a"),
        stage.engine(other, "--relay", relay.address, "--instance-name", "b"),
    ]
    for seed in seeds:
        await reach(seed)
    lost = stage.target(relay)
    named = stage.target(relay, "--from", "second")
    status = await reach(named)
    assert status.model == "second"
    assert status.weights_digest == (await status_of(seeds[1])).weights_digest
    assert lost.wait() == 1
    assert "several models are on offer: second (from b), tiny (from a)" in lost.log_tail()


async def test_taken_port(stage: Stage, model: Path) -> None:
    """A service whose port is in use exits with a message, whoever holds the port."""
    with socket.socket() as plain:
        plain.bind(("127.0.0.1", 0))
        plain.listen()
        held = f"127.0.0.1:{plain.getsockname()[1]}"
        with pytest.raises(LaunchError, match="port is in use"):
            stage.relay(listen=held)
    relay = stage.relay()
    for start in (stage.relay, lambda listen: stage.engine(model, listen=listen)):
        with pytest.raises(LaunchError, match="port is in use"):
            start(listen=relay.address)


async def test_free_ports_are_distinct(stage: Stage) -> None:
    """Eight relays that ask for a free port at once get eight ports."""
    relays = await asyncio.gather(*(asyncio.to_thread(stage.relay) for _ in range(8)))
    assert len({relay.address for relay in relays}) == 8
    assert not any(relay.address.endswith(":0") for relay in relays)


async def test_broken_checkpoint_is_refused_at_start(
    stage: Stage, model: Path, tmp_path: Path
) -> None:
    """A checkpoint cut by a byte, or without a tensor, is refused by name and never ready."""
    cut = _copy(model, tmp_path / "cut")
    weights = cut / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    lacking = _copy(model, tmp_path / "lacking")
    _rename_tensor(lacking / "model.safetensors", b"model.layers.2.mlp", b"model.layers.7.mlp")
    first, second = stage.engine(cut), stage.engine(lacking)
    assert first.wait() == 1
    assert "model.safetensors" in first.log_tail()
    assert second.wait() == 1
    assert "model.layers.2.mlp" in second.log_tail()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--listen", "0.0.0.0:0"), "beyond loopback"),
        (("--listen", "nonsense"), "not HOST:PORT"),
        (("--listen", "127.0.0.1:0", "--load-format", "magic"), "load_format"),
        (("--listen", "127.0.0.1:0", "--rate-limit", "fast"), "is not a rate"),
        (("--listen", "127.0.0.1:0", "--expert-map", "none.json"), "No such file"),
    ],
)
def test_wrong_settings_are_usage_errors(
    model: Path, arguments: tuple[str, ...], message: str
) -> None:
    """A setting that cannot work ends with exit code 2 and says which."""
    result = seedrelay("engine", "--model", str(model), *arguments)
    assert result.status == 2
    assert message in result.err


def test_unreachable_is_exit_code_3() -> None:
    """A command that nobody answers says so and exits with 3, also as JSON."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        result = seedrelay("status", address, "--json")
    assert result.status == 3
    assert result.json()["error"]["code"] == "UNAVAILABLE"
    assert address in result.err


async def test_bad_requests_hurt_nobody(fleet: Fleet) -> None:
    """Requests that can never be served are refused by field, and the next one is served."""
    engine = fleet.seed
    expected = await answer(engine)
    bad = [
        request(""), request(max_tokens=-1), request(temperature=float("nan")),
        request(top_p=1.5), request("x" * 3000), request(stop_token_ids=[4096]),
        engine_pb2.GenerateRequest(),
        *(engine_pb2.GenerateRequest(tokens=engine_pb2.TokenPrompt(token_ids=[token]))
          for token in (-1, 4096, 2**31 - 1)),
    ]  # fmt: skip
    for asked in bad:
        refused = await refusal(engine, asked)
        assert refused.code == "INVALID_ARGUMENT"
        assert refused.details["field"]
    assert await answer(engine) == expected
    assert await health(engine, "seedrelay.v1.EngineService") == "SERVING"


def _copy(model: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def _rename_tensor(weights: Path, old: bytes, new: bytes) -> None:
    data = weights.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + size].replace(old, new)
    assert json.loads(header)
    weights.write_bytes(data[:8] + header + data[8 + size :])


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there may be a CUDA device")
def test_cuda_without_a_device_is_refused_at_once(model: Path) -> None:
    """An engine that is asked for CUDA on a host without it exits and says what to do."""
    done = seedrelay("engine", "--model", str(model), "--listen", "127.0.0.1:0", "--device", "cuda")
    assert (done.status, done.out) == (1, "")
    assert "no CUDA driver" in done.err
    assert "--device cpu" in done.err


def test_a_device_of_another_name_is_wrong_usage(model: Path) -> None:
    """A device that nobody knows is refused before anything starts."""
    done = seedrelay("engine", "--model", str(model), "--listen", "127.0.0.1:0", "--device", "tpu")
    assert done.status == 2
    assert "device 'tpu' is unknown" in done.err
