"""Compares what lies in arenas: two listings → what differs. Plain Python, pure functions.

Digests of blocks find that something differs. Which tensor it is, only digests of tensors
say: several small ones may share a block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from engine_service.core.check_messages import FoundWeights
from engine_service.core.check_report import Difference
from relay_service.core.manifest import BLOCK_BYTES, Manifest, TensorEntry, Unit

_WITHIN = ("kind", "dtype", "shape", "strides", "nbytes")
"""What tensors have in common that are equal wherever they lie."""
_FIELDS = (*_WITHIN, "offset", "alias", "cut")
Digests = Mapping[str, bytes]
"""Of tensors, by name."""


class _Pair(NamedTuple):
    """Two units that shall hold the same; they may lie at different places."""

    expected: Unit
    found: Unit
    rank: int
    first: int
    """Flat index of the first block of the second."""


def entries(manifest: Manifest) -> list[TensorEntry]:
    """Returns all tensors of an arena, in order."""
    return [entry for unit in manifest.units for entry in unit.tensors]


def tensor_digests(found: FoundWeights) -> dict[str, bytes]:
    """Returns the digest of each tensor by its name."""
    names = (entry.name for entry in entries(found.manifest))
    return dict(zip(names, found.tensors, strict=True))


def with_manifest(
    expected: Manifest, found: FoundWeights, known: Digests | None = None
) -> Iterator[Difference]:
    """Compares a rank with its verified manifest; `known` are its tensors' right digests."""
    if difference := expected.layout_difference(found.manifest):
        yield Difference(rank=found.manifest.rank, tensor="", what=f"layout: {difference}")
        return
    own = tensor_digests(found)
    for unit, (first, mine) in zip(expected.units, _numbered(found), strict=True):
        yield from _contents(_Pair(unit, mine, found.manifest.rank, first), known, own)


def with_snapshot(was: FoundWeights, found: FoundWeights) -> Iterator[Difference]:
    """Compares a rank with itself as it was: names, types, shapes, places and contents."""
    old = tensor_digests(was)
    if was.manifest.layout_difference(found.manifest):
        yield from _laid_out_anew(was.manifest, found, old)
    else:
        yield from with_manifest(was.manifest, found, old)


def with_units(
    theirs: Mapping[tuple[int, str], Unit], found: Sequence[FoundWeights], parts: int
) -> Iterator[Difference]:
    """Compares ranks with the units of another instance, wherever either has them.

    `theirs` are by tensor-parallel rank, of `parts`, and name.
    """
    seen = set()
    for one in found:
        rank, own = one.manifest.rank, tensor_digests(one)
        for first, unit in _numbered(one):
            key = (rank % parts, unit.name)
            seen.add(key)
            if key in theirs:
                yield from _contents(_Pair(theirs[key], unit, rank, first), None, own)
            else:
                yield Difference(rank=rank, tensor=unit.name, what="a unit that is only here")
    for part, name in sorted(theirs.keys() - seen):
        yield Difference(rank=part, tensor=name, what="a unit that is only there")


def replicas(found: Sequence[FoundWeights], parts: int) -> Iterator[Difference]:
    """Compares units that several ranks hold, of `parts` each, with the first one of each."""
    firsts: dict[tuple[int, str], tuple[int, Unit, Digests]] = {}
    for one in found:
        rank, own = one.manifest.rank, tensor_digests(one)
        for first, unit in _numbered(one):
            key = (rank % parts, unit.name)
            holder, other, digests = firsts.setdefault(key, (rank, unit, own))
            words = f"replica of {_called(unit.name)} on rank {holder}"
            yield from _contents(_Pair(other, unit, rank, first), digests, own, words)


def misplaced(found: FoundWeights, address: int) -> Iterator[Difference]:
    """Says what does not lie where it always lay (`address` of the arena), or isn't read there."""
    rank = found.manifest.rank
    if found.address != address:
        yield Difference(
            rank=rank, tensor="", what="address of the arena",
            expected=f"{address:#x}", found=f"{found.address:#x}",
        )  # fmt: skip
    offsets = {entry.name: entry.offset for entry in entries(found.manifest)}
    for name in found.misplaced:
        expected = f"{found.address + offsets[name]:#x}"
        yield Difference(rank=rank, tensor=name, what="address", expected=expected)


def _contents(
    pair: _Pair, expected: Digests | None, found: Digests, words: str = "contents"
) -> Iterator[Difference]:
    """Names the tensors of a unit that differ, then blocks that differ without one.

    Without `expected` digests, every tensor is named that lies in a block that differs.
    """
    theirs, mine = pair.expected, pair.found
    if (theirs.nbytes, theirs.digests) == (mine.nbytes, mine.digests):
        return
    if otherwise := _laid_out_otherwise(theirs, mine):
        what = f"{words}: laid out otherwise"
        yield Difference(rank=pair.rank, tensor=otherwise, block=pair.first, what=what)
        return
    blocks = enumerate(zip(theirs.digests, mine.digests, strict=True))
    differing = {number: both for number, both in blocks if both[0] != both[1]}
    unexplained = set(differing)
    for entry in mine.tensors:
        hit = [number for number in _blocks(mine, entry) if number in differing]
        if entry.alias or not hit or (expected and expected[entry.name] == found[entry.name]):
            continue
        unexplained.difference_update(hit)
        # One that it shares may differ because of another tensor.
        shared, number = min((_sharing(mine, number), number) for number in hit)
        both = differing[number]
        what = f"{words}, or those of {shared} more in its block" if shared else words
        if expected:
            both, what = (expected[entry.name], found[entry.name]), words
        yield _difference(pair, number, entry.name, what, both)
    for number in sorted(unexplained):
        what = f"{words}, between the tensors of {mine.name}"
        yield _difference(pair, number, "", what, differing[number])


def _difference(
    pair: _Pair, number: int, tensor: str, what: str, both: tuple[bytes, bytes]
) -> Difference:
    return Difference(
        rank=pair.rank, tensor=tensor, block=pair.first + number, what=what,
        expected=both[0].hex(), found=both[1].hex(),
    )  # fmt: skip


def _laid_out_anew(was: Manifest, found: FoundWeights, old: Digests) -> Iterator[Difference]:
    """Compares tensors by name alone, where blocks are not those of before."""
    before = {entry.name: entry for entry in entries(was)}
    rank, new = found.manifest.rank, tensor_digests(found)
    for name in before:
        if name not in new:
            yield Difference(rank=rank, tensor=name, what="gone", expected=old[name].hex())
    for entry in entries(found.manifest):
        name = entry.name
        blocks = found.manifest.blocks_at(entry.offset, max(entry.nbytes, 1))
        if name not in before:
            what, expected, seen = "added", "", new[name].hex()
        elif field := _first_difference(_FIELDS, before[name], entry):
            expected, seen = str(getattr(before[name], field)), str(getattr(entry, field))
            what = f"{field} {seen}, was {expected}"
        elif old[name] != new[name] and not entry.alias:
            what, expected, seen = "contents", old[name].hex(), new[name].hex()
        else:
            continue
        yield Difference(
            rank=rank, tensor=name, block=blocks.start, what=what, expected=expected, found=seen
        )


def _laid_out_otherwise(one: Unit, other: Unit) -> str:
    """Names the first tensor, or the unit, that is another or lies elsewhere in it; or nothing."""
    for left, right in zip(one.tensors, other.tensors, strict=False):
        apart = not right.alias and left.offset - one.offset != right.offset - other.offset
        if apart or left.name != right.name or _first_difference(_WITHIN, left, right):
            return right.name
    if (one.nbytes, len(one.tensors)) != (other.nbytes, len(other.tensors)):
        return other.name
    return ""


def _numbered(found: FoundWeights) -> Iterator[tuple[int, Unit]]:
    """Yields every unit with the flat index of its first block."""
    first = 0
    for unit in found.manifest.units:
        yield first, unit
        first += unit.block_count


def _blocks(unit: Unit, entry: TensorEntry) -> range:
    """Returns which blocks of a unit a tensor of it lies in."""
    start = entry.offset - unit.offset
    return range(start // BLOCK_BYTES, -(-(start + entry.nbytes) // BLOCK_BYTES))


def _sharing(unit: Unit, number: int) -> int:
    """Returns how many tensors besides one lie in a block of a unit."""
    owners = (entry for entry in unit.tensors if entry.nbytes and not entry.alias)
    return sum(number in _blocks(unit, entry) for entry in owners) - 1


def _first_difference(fields: Iterable[str], one: TensorEntry, other: TensorEntry) -> str:
    return next((name for name in fields if getattr(one, name) != getattr(other, name)), "")


def _called(unit: str) -> str:
    """Returns `expert 3` for `layer.1.expert.3`; of which layer, the tensor says."""
    kind, _, number = unit.rpartition(".")
    return f"expert {number}" if kind.endswith(".expert") else unit
