"""Checks, before a byte is read, that a checkpoint is exactly what a model needs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from engine_service.device.checkpoint import StoredTensor
from engine_service.device.dtypes import stored_dtype
from engine_service.device.models.llama_format import EMBEDDING, HEAD
from engine_service.errors import CheckpointError

_MAX_LISTED = 8
_COMPARE_BYTES = 1 << 20
# Old exports carry the frequencies; the tables are computed from the configuration.
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")


def check_fit(stored: Mapping[str, StoredTensor], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises `CheckpointError` listing what is missing, unknown or of another shape or type.

    `shapes` names every tensor that the model needs. A head beside tied embeddings is
    let pass when it equals the embedding.
    """
    missing = [name for name in shapes if name not in stored]
    if missing:
        raise CheckpointError(f"missing tensors: {_listed(missing)}", tensor=missing[0])
    unknown = [name for name in stored if name not in shapes and not _IGNORED.search(name)]
    if HEAD in unknown and EMBEDDING in stored:
        _check_tied(stored[HEAD], stored[EMBEDDING])
        unknown.remove(HEAD)
    if unknown:
        raise CheckpointError(
            f"{stored[unknown[0]].path.name}: unknown tensors: {_listed(unknown)}",
            file=stored[unknown[0]].path.name, tensor=unknown[0],
        )  # fmt: skip
    for name, shape in shapes.items():
        _check_tensor(stored[name], shape)


def _check_tensor(stored: StoredTensor, shape: tuple[int, ...]) -> None:
    where = {"file": stored.path.name, "tensor": stored.name}
    if stored.shape != shape:
        raise CheckpointError(
            f"{stored.path.name}: {stored.name} has shape {list(stored.shape)}, "
            f"the model needs {list(shape)}",
            expected=str(list(shape)), found=str(list(stored.shape)), **where,
        )  # fmt: skip
    if stored_dtype(stored.dtype) is None:
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


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
