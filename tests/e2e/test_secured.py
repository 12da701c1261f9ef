"""Services that demand mutual TLS and tokens, as real processes, and commands that bring them."""

from __future__ import annotations

import dataclasses
import json
import ssl
import time
import urllib.request
from pathlib import Path

import pytest
from certificates import TOKEN, Authority, Tokens
from stage import Stage, seedrelay

from clients.launch import Service
from relay_service.core.security import Security

PEOPLE, RELAYS = "token-of-somebody-who-asks", TOKEN


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    """The CA of the fleet."""
    return Authority(tmp_path)


@pytest.fixture
def security(authority: Authority, tmp_path: Path) -> Security:
    """What the services of the fleet are started with."""
    tokens = Tokens(tmp_path / "tokens").write(
        f"relay {RELAYS}", f"generate {PEOPLE}", f"control {PEOPLE}-and-commands"
    )
    return dataclasses.replace(authority.issue("service"), token_file=tokens)


def flags(security: Security) -> list[str]:
    """Returns the options that name the files."""
    names = ("tls_cert", "tls_key", "tls_ca", "token_file")
    given = {name: getattr(security, name) for name in names}
    return [part for name, value in given.items() if value
            for part in (f"--{name.replace('_', '-')}", value)]  # fmt: skip


def test_a_secured_fleet(
    stage: Stage, authority: Authority, security: Security, model: Path, tmp_path: Path
) -> None:
    """Two hosts beyond loopback relay weights; a client does what its token allows, no more."""
    here = stage.relay(*flags(security), listen="0.0.0.0:0")
    port = here.address.rpartition(":")[2]
    here.stop()
    here = stage.relay(*flags(security), "--log-format", "json", "--advertise", f"127.0.0.1:{port}",
                       listen=f"0.0.0.0:{port}")  # fmt: skip
    here.address = f"127.0.0.1:{port}"
    telling = ["--log-format", "json", "--metrics-listen", "127.0.0.1:0"]
    there = stage.relay(*flags(security), *telling, "--join", here.address)
    stage.engine(model, "--relay", here.address, "--instance-name", "seed", *flags(security))
    target = stage.target(there, "--instance-name", "target", *telling, *flags(security))
    asking = Tokens(tmp_path / "asking").write(f"generate {PEOPLE}")
    person = dataclasses.replace(authority.issue("person"), token_file=asking)
    deadline = time.monotonic() + 60
    while True:
        answered = seedrelay("generate", "Hi", "--engine", target.address, "--max-tokens", "4",
                             "--json", *flags(person))  # fmt: skip
        if answered.status == 0 or time.monotonic() > deadline:
            break
        assert "UNAVAILABLE" in answered.out or "is not READY" in answered.err, answered.err
    assert answered.status == 0, answered.err
    refused = seedrelay("pull", "--engine", target.address, "--relay", there.address, "--json",
                        *flags(person))  # fmt: skip
    assert (refused.status, refused.json()["error"]["code"]) == (1, "PERMISSION_DENIED")
    fleet = seedrelay("status", there.address, "--json", *flags(security))
    assert {i["instance"]: i["state"] for i in fleet.json()["instances"]} == {
        "seed": "READY",
        "target": "READY",
    }
    assert seedrelay("status", there.address).status == 3
    _check_metrics(there, target, person)
    _check_story(here, there, target)
    logs = [service.log.read_text() for service in stage.services]
    assert not any(secret in log for log in logs for secret in (PEOPLE, RELAYS, "PRIVATE KEY"))


def _check_metrics(there: Service, target: Service, person: Security) -> None:
    """Both endpoints want a certificate, and tell of the fill and of the answer."""
    context = ssl.create_default_context(cafile=person.tls_ca)
    context.load_cert_chain(person.tls_cert, person.tls_key)
    text = ""
    for service in (there, target):
        url = f"https://{service.metrics_address}/metrics"
        with urllib.request.urlopen(url, timeout=10, context=context) as answer:
            text += answer.read().decode()
    assert 'seedrelay_relay_bytes_total{direction="received",transport="tcp"}' in text
    assert 'seedrelay_relay_transfers_total{outcome="complete"} 1.0' in text
    assert 'seedrelay_engine_state{seedrelay_engine_state="READY"} 1.0' in text
    assert 'seedrelay_engine_requests_total{finish_reason="length"} 1.0' in text
    assert 'seedrelay_engine_start_phase_seconds{phase="land"}' in text


def _check_story(here: Service, there: Service, target: Service) -> None:
    """The transfer has one name in all three logs, and each says once how it ended."""
    ends = {here: "lease released", there: "transfer ended: complete",
            target: "fill ended: ready with v0"}  # fmt: skip
    told = []
    for service, message in ends.items():
        lines = [json.loads(line) for line in service.log.read_text().splitlines()]
        assert all({"time", "level", "logger", "message", "instance"} <= set(x) for x in lines)
        (line,) = [x for x in lines if x["message"] == message]
        assert line["seconds"] > 0
        told.append(line)
    assert len({(line["transfer"], line["bytes"]) for line in told}) == 1
    assert told[0]["transfer"]
    assert told[1]["transport"] == told[2]["transport"] == "tcp"


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (("tls_cert",), "a certificate and its key come together"),
        (("tls_cert", "tls_key"), "--tls-cert, --tls-key is missing"),
        (("token_file",), "--token-file is missing"),
        (("tls_cert", "tls_key", "tls_ca", "token_file"), "beyond loopback"),
    ],
)
def test_beyond_loopback_without(
    security: Security, missing: tuple[str, ...], message: str, model: Path
) -> None:
    """Both services exit with 2 and name what is missing before they listen."""
    short = dataclasses.replace(security, **dict.fromkeys(missing, ""))
    for command in (["relay"], ["engine", "--model", str(model)]):
        result = seedrelay(*command, "--listen", "0.0.0.0:0", *flags(short))
        assert (result.status, result.out) == (2, "")
        assert message in result.err


def test_files_that_are_wrong(security: Security, model: Path, tmp_path: Path) -> None:
    """Both services refuse files that cannot be used, and so do commands, without a secret."""
    loose = Tokens(tmp_path / "loose").write(f"relay {RELAYS}", mode=0o644)
    wrong = flags(dataclasses.replace(security, token_file=loose))
    commands = [
        ["relay", "--listen", "127.0.0.1:0"],
        ["engine", "--model", str(model), "--listen", "127.0.0.1:0"],
        ["status", "127.0.0.1:1"],
    ]
    for command in commands:
        result = seedrelay(*command, *wrong)
        assert (result.status, result.out) == (2, ""), result.err
        assert "open to others" in result.err
        assert RELAYS not in result.err
