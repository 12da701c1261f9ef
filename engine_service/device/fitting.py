"""Checks, before a byte is read, that a checkpoint is exactly what a model needs."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence

from engine_service.device.checkpoint import TensorHeader
from engine_service.device.converting import Change
from engine_service.device.dtypes import SCALES_SUFFIX, SERVED, stored_dtype
from engine_service.device.formats.layouts import BLOCK
from engine_service.device.models.llama_format import EMBEDDING, HEAD
from engine_service.errors import ArenaError, CheckpointError
from relay_service.core.dtypes import DType
from relay_service.core.manifest import Manifest

_MAX_LISTED = 8
# Old exports carry the frequencies; the tables are computed from the configuration.
_IGNORED = re.compile(r"\.rotary_emb\.inv_freq$")
_Shapes = Mapping[str, tuple[int, ...]]


def check_fit(
    headers: Mapping[str, TensorHeader], shapes: _Shapes, changes: Iterable[Change],
    *, misplaced: Sequence[str] = (), narrow: bool, tied_equal: Callable[[], bool],
    whole: Iterable[Sequence[str]] | None = None,
) -> None:  # fmt: skip
    """Raises one `CheckpointError` that lists everything that does not fit.

    A matrix of a layer or a head may be float8 beside its scales, one per block of 128 by
    128. A head beside tied embeddings is let pass when it equals the embedding: the two are
    one storage, so one that differs could only be dropped, and is refused.

    Args:
        headers: Of all tensors that there are, by name.
        shapes: Of all tensors that the model needs, by name.
        changes: What becomes of their numbers.
        misplaced: In words, where an index and files disagree.
        narrow: Whether a tensor may lose bits because its type was asked for.
        tied_equal: Compares a head and an embedding of equal type and shape.
        whole: None where every tensor must be there. Else some may stay away, but each of
            these groups comes whole or not at all: a format makes one matrix of it.
    """
    own = shapes
    shapes = {**shapes, **_scale_shapes(headers, shapes)}
    found = {name: headers[name] for name in shapes if name in headers}
    unknown = [name for name in headers if name not in shapes and not _IGNORED.search(name)]
    untied = []
    if HEAD in unknown and EMBEDDING in headers:
        unknown.remove(HEAD)
        untied = _untied(headers[HEAD], headers[EMBEDDING], tied_equal)
    elif HEAD in unknown and whole is not None:
        unknown.remove(HEAD)
        untied = [f"{HEAD} is {EMBEDDING} (tie_word_embeddings), so send that one instead"]
    required = shapes if whole is None else shapes.keys() - own.keys()
    _refuse(headers, {
        "misplaced tensors": misplaced,
        "missing tensors": [
            *(name for name in shapes if name in required and name not in headers),
            *_lacking(headers, whole or ()),
        ],
        "unknown tensors": unknown,
        "a head of its own": untied,
        "tensors of another shape": [
            f"{one.origin}: {name} has shape {list(one.shape)}, the model needs {list(shape)}"
            for name, shape in shapes.items()
            if (one := headers.get(name)) and one.shape != shape
        ],
        "tensors of another type": [
            f"{one.origin}: {name} has dtype {one.dtype}, which is not a supported floating type"
            for name, one in found.items()
            if not _is_read(one, scaled=name + SCALES_SUFFIX in shapes)
        ],
        "tensors that would lose bits": [] if narrow else [
            f"{one.tensor} is {one.source} and would be held as {one.target}"
            for one in changes if one.lossy and not one.by_name
        ],
    })  # fmt: skip


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


def _refuse(headers: Mapping[str, TensorHeader], faults: Mapping[str, Sequence[str]]) -> None:
    """Raises what was found, each kind with its number and its first names."""
    found = {kind: words for kind, words in faults.items() if words}
    if not found:
        return
    counts = ", ".join(f"{len(words)} {kind}" for kind, words in found.items())
    lists = "; ".join(f"{kind}: {listed(words)}" for kind, words in found.items())
    first = next(iter(found.values()))[0].rpartition(": ")[2].partition(" ")[0]
    details = {"tensor": first, "found": counts}
    if first in headers:
        details["file"] = headers[first].origin
    if found.keys() == {"tensors that would lose bits"}:
        details["hint"] = "name the type with --dtype, or allow narrowing, to have them converted"
    summary = f"{counts}. " if len(found) > 1 else ""
    raise CheckpointError(f"the checkpoint does not fit the model: {summary}{lists}", **details)


def _scale_shapes(headers: Mapping[str, TensorHeader], shapes: _Shapes) -> _Shapes:
    """Names the scales that must be there too."""
    return {
        name + SCALES_SUFFIX: tuple(-(-size // BLOCK) for size in shape)
        for name, shape in shapes.items()
        if len(shape) > 1 and name != EMBEDDING
        if name in headers and stored_dtype(headers[name].dtype) is DType.F8_E4M3
    }


def _lacking(headers: Mapping[str, TensorHeader], groups: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yields what lacks of groups of which something is there."""
    lacking = (
        name
        for group in groups
        if any(one in headers for one in group)
        for name in group
        if name not in headers
    )
    yield from dict.fromkeys(lacking)


def _is_read(header: TensorHeader, *, scaled: bool) -> bool:
    dtype = stored_dtype(header.dtype)
    return dtype is not None and (dtype is not DType.F8_E4M3 or scaled)


def _untied(head: TensorHeader, embedding: TensorHeader, equal: Callable[[], bool]) -> list[str]:
    same = (head.dtype, head.shape) == (embedding.dtype, embedding.shape)
    if same and equal():
        return []
    found = f"{head.name} differs from {embedding.name}, but the configuration ties them"
    return [f"{found} (tie_word_embeddings)"]
