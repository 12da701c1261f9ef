"""Calls the weights that serve otherwise. They stay what they are. Plain Python."""

from __future__ import annotations

import msgspec

from engine_service.core.instance import Instance
from engine_service.errors import InvalidRequest, WrongState


async def relabel(instance: Instance, version: str, base_digest: str, operator: str) -> str:
    """Gives the weights another version; returns the former one.

    Digest, epoch and KV stay; running answers carry it from their next token. Raises
    `InvalidRequest`, or `WrongState` where no weights serve, or others than `base_digest`.
    """
    weights = instance.engine.weights
    if not version:
        raise InvalidRequest("a version is needed", field="weight_version")
    if not weights.digest:
        raise WrongState(f"{instance.identity.name} serves no weights", field="state")
    if base_digest and base_digest != weights.digest:
        raise WrongState(
            "other weights serve", field="base_digest", expected=base_digest, found=weights.digest
        )
    # What finds KV is epoch and digest: it stays in use.
    instance.engine.weights = msgspec.structs.replace(weights, version=version)
    if version != weights.version:
        instance.history.serve(instance.engine.weights, "label", operator)
        await instance.tell_relay()
    return weights.version
