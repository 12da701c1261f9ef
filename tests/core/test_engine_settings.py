"""Settings of an engine that cannot work together are refused, with the field and a way out."""

import pytest
from typer.testing import CliRunner

from clients.cli import app
from engine_service.config import EngineConfig
from engine_service.errors import ConfigError

GROUPS = {"expert_parallel_size": 2}


def config(**settings) -> EngineConfig:
    """Returns settings of an engine on this host."""
    return EngineConfig(model="m", listen="127.0.0.1:0", **settings)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"on_rank_loss": "degrade"}, "on_rank_loss"),
        ({"on_rank_loss": "recover", "tensor_parallel_size": 2}, "on_rank_loss"),
        ({"on_rank_loss": "recover", "device": "cuda"} | GROUPS, "on_rank_loss"),
        ({"on_rank_loss": "retry"} | GROUPS, "on_rank_loss"),
        ({"lost_experts": "drop"}, "lost_experts"),
        ({"spare_ranks": 1}, "spare_ranks"),
        ({"spare_ranks": 1, "device": "cuda"} | GROUPS, "spare_ranks"),
        ({"spare_ranks": -1} | GROUPS, "spare_ranks"),
        ({"recovery_deadline_seconds": 0}, "recovery_deadline_seconds"),
    ],
)
def test_what_cannot_work(settings, field):
    """Each names its field."""
    with pytest.raises(ConfigError) as refused:
        config(**settings)
    assert refused.value.details["field"] == field


@pytest.mark.parametrize("policy", ["fail", "degrade", "recover"])
def test_what_works(policy):
    """Each policy with several groups on CPUs; `fail` on anything."""
    assert config(on_rank_loss=policy, spare_ranks=2, **GROUPS).on_rank_loss == policy
    assert config(device="cuda", **GROUPS).on_rank_loss == "fail"


@pytest.mark.parametrize(
    ("policy", "wanted", "ready"),
    [
        ("recover", None, 3), ("recover", 0, 0), ("recover", 1, 1), ("degrade", None, 0),
        ("degrade", 2, 2), ("fail", None, 0),
    ],
)  # fmt: skip
def test_who_stands_ready(policy, wanted, ready):
    """Where ranks are recovered, those of a group, unless somebody says otherwise."""
    settings = {"tensor_parallel_size": 3, "spare_ranks": wanted, **GROUPS}
    assert config(on_rank_loss=policy, **settings).spares == ready


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--on-rank-loss", "degrade"), "name --ep above 1"),
        (("--on-rank-loss", "degrade", "--ep", "2", "--device", "cuda"), "use --device cpu"),
        (("--lost-experts", "drop"), "'drop' is unknown"),
        (("--recovery-deadline", "0"), "recovery_deadline_seconds must be above 0"),
        (("--spare-ranks", "1"), "name --ep above 1"),
    ],
)
def test_options(options, words):
    """They reach the settings: what cannot work is wrong usage, before anything starts."""
    line = ["engine", "--model", "m", "--listen", "127.0.0.1:0", *options]
    done = CliRunner().invoke(app, line)
    assert done.exit_code == 2
    assert words in done.stderr
