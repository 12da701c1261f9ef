"""The small files of a model: what travels beside the weights. Plain Python."""

from __future__ import annotations

from pathlib import Path

from engine_service.core.tokenizer import read_json
from engine_service.errors import ConfigError, ModelError
from relay_service.core.attachment import ARTIFACT_NAMES, MAX_ARTIFACT_BYTES
from relay_service.core.instance import Instance


def read_folder(folder: Path) -> dict[str, bytes]:
    """Reads the files that travel, by name. Raises `ConfigError` without the folder."""
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder", field="model",
            hint="`seedrelay model fetch smollm2` makes one and prints its path",
        )  # fmt: skip
    files: dict[str, bytes] = {}
    for name in sorted(ARTIFACT_NAMES):
        path = folder / name
        if path.is_file():
            if path.stat().st_size > MAX_ARTIFACT_BYTES:
                raise ModelError(f"{path} is larger than {MAX_ARTIFACT_BYTES} bytes", field=name)
            files[name] = path.read_bytes()
    return files


def stated_dtype(files: dict[str, bytes]) -> str:
    """Returns the type of the weights by `config.json`. Raises `ModelError`."""
    stated = read_json(files, "config.json")
    return str(stated.get("torch_dtype") or stated.get("dtype") or "float32")


def offering(instances: list[Instance]) -> list[Instance]:
    """Lists whose files may be taken, as sources of weights: the complete ones first.

    One that is being filled has the files of what it is filled with.
    """
    complete = [i for i in instances if i.artifacts and i.state.holds_weights]
    filling = [i for i in instances if i.artifacts and i.filling and i.state.fillable]
    return [*complete, *(i.as_source() for i in filling)]


def choose_offer(instances: list[Instance], wanted: str) -> Instance | None:
    """Chooses whose model an empty target takes; none when nobody offers one yet.

    `wanted` names an instance or a model. Raises `ConfigError` with the list when
    several models are on offer and none is named.
    """
    offers = offering(instances)
    if wanted:
        offers = [i for i in offers if wanted in (i.instance, i.model)]
    # A filled instance may call the model by another folder's name: equal weights are one model.
    formats, weights = {i.format.fingerprint for i in offers}, {i.weights.digest for i in offers}
    if len(formats) > 1 or (len(weights) > 1 and len({i.model for i in offers}) > 1):
        listed = ", ".join(sorted(f"{i.model} (from {i.instance})" for i in offers))
        raise ConfigError(
            f"several models are on offer: {listed}",
            field="from", expected="one of them", hint="name one with --from",
        )  # fmt: skip
    return offers[0] if offers else None
