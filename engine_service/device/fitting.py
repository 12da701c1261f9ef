"""Checks, before a byte is read, that a checkpoint is exactly what a model needs."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Mapping, Sequence

from engine_service.device.checkpoint import StoredTensor
from engine_service.device.dtypes import SCALES_SUFFIX, SERVED, stored_dtype
from engine_service.device.formats.layouts import BLOCK
from engine_service.device.models.llama_format import EMBEDDING, HEAD
from engine_service.errors import ArenaError, CheckpointError
from relay_service.core.dtypes import DType
from relay_service.core.manifest import Manifest

_MAX_LISTED = 8
_COMPARE_BYTES = 1 << 20
# Old exports carry the frequencies; the tables are computed from the configuration.
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")


def check_fit(stored: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `CheckpointError` listing what is missing, unknown or of another shape or type.

    `shapes` names every tensor that the model needs. A head beside tied embeddings is
    let pass when it equals the embedding. A matrix of a layer or a head may be float8 beside
    its scales, one per block of 128 by 128.
    """
    shapes = {**shapes, **_scale_shapes(stored, shapes)}
    missing = [name for name in shapes if name not in stored]
    if missing:
        raise CheckpointError(f"missing tensors: {listed(missing)}", tensor=missing[0])
    unknown = [name for name in stored if name not in shapes and not _IGNORED.search(name)]
    if HEAD in unknown and EMBEDDING in stored:
        _check_tied(stored[HEAD], stored[EMBEDDING])
        unknown.remove(HEAD)
    if unknown:
        raise CheckpointError(
            f"{stored[unknown[0]].path.name}: unknown tensors: {listed(unknown)}",
            file=stored[unknown[0]].path.name, tensor=unknown[0],
        )  # fmt: skip
    for name, shape in shapes.items():
        _check_tensor(stored[name], shape, scaled=name + SCALES_SUFFIX in shapes)


def check_filled(manifest: Manifest, processed: Container[str]) -> None:
    """Refuses to convert a checkpoint into a type that means nothing without a scale.

    Raises `ArenaError` naming a tensor that is not among `processed`, which formats fill.
    """
    for entry in (entry for unit in manifest.units for entry in unit.tensors):
        if entry.logical and entry.name not in processed and entry.dtype not in SERVED:
            raise ArenaError(
                f"{entry.name} holds {entry.dtype}: only its format can fill it", tensor=entry.name
            )


def listed(names: Sequence[str]) -> str:
    """Returns the first names in words."""
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more


def _scale_shapes(
    stored: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Names the scales that must be there too."""
    return {
        name + SCALES_SUFFIX: tuple(-(-size // BLOCK) for size in shape)
        for name, shape in shapes.items()
        if len(shape) > 1 and name != EMBEDDING
        if name in stored and stored_dtype(stored[name].dtype) is DType.F8_E4M3
    }


def _check_tensor(stored: StoredTensor, shape: tuple[int, ...], *, scaled: bool) -> None:
    where = {"file": stored.path.name, "tensor": stored.name}
    if stored.shape != shape:
        raise CheckpointError(
            f"{stored.path.name}: {stored.name} has shape {list(stored.shape)}, "
            f"the model needs {list(shape)}",
            expected=str(list(shape)), found=str(list(stored.shape)), **where,
        )  # fmt: skip
    if (dtype := stored_dtype(stored.dtype)) is None or (dtype is DType.F8_E4M3 and not scaled):
        raise CheckpointError(
            f"{stored.path.name}: {stored.name} has dtype {stored.dtype}, which is not a "
            "supported floating type",
            found=stored.dtype, **where,
        )  # fmt: skip


def _check_tied(head: StoredTensor, embedding: StoredTensor) -> None:
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    if not same or not _equal_bytes(head, embedding):
        raise CheckpointError(
            f"{head.path.name}: {head.name} differs from {embedding.name}, but the "
            "configuration ties them (tie_word_embeddings)",
            file=head.path.name, tensor=head.name,
        )  # fmt: skip


def _equal_bytes(one: StoredTensor, other: StoredTensor) -> bool:
    with one.path.open("rb") as left, other.path.open("rb") as right:
        for done in range(0, one.nbytes, _COMPARE_BYTES):
            size = min(_COMPARE_BYTES, one.nbytes - done)
            mine = os.pread(left.fileno(), size, one.offset + done)
            if mine != os.pread(right.fileno(), size, other.offset + done):
                return False
    return True
