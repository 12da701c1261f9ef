"""Plans of ranks that are cut otherwise than their sources, spelled out."""

import msgspec
import pytest
from cutting import carry_out, columns, contents, holder, rows, tensor

from relay_service.core.copies import Copy, merged
from relay_service.core.cut import Cut, Part
from relay_service.core.dtypes import DType
from relay_service.core.holder import Holder
from relay_service.core.layout import TensorSpec, UnitSpec, lay_out
from relay_service.core.manifest import Manifest
from relay_service.core.planner import Planner

DOWN, NORM = (4, 8), (5, 1)


def by_rows(*counts: int):
    """Ranks that hold so many rows of one matrix of 8 columns each, in turn."""
    whole, firsts = (sum(counts), 8), [sum(counts[:n]) for n in range(len(counts))]
    parts = [rows("up", whole, *span) for span in zip(firsts, counts, strict=True)]
    return [holder(f"rank {n}", {"u": [tensor("w", part)]}) for n, part in enumerate(parts)]


def by_columns(*counts: int, row: int = 0):
    """Ranks that hold so many columns of one matrix of 4 rows each, in turn."""
    whole, firsts = (4, sum(counts)), [sum(counts[:n]) for n in range(len(counts))]
    parts = [columns("down", whole, *span) for span in zip(firsts, counts, strict=True)]
    return [holder(f"{n}", {"u": [tensor("w", part, row=row)]}) for n, part in enumerate(parts)]


def attention(rank: int, ranks: int, heads: int = 4, kv_heads: int = 2):
    """A rank's fused heads of 2 rows by 8: its part of q, and of k and v or a copy of one head."""
    copies = max(1, ranks // kv_heads)
    own, kept = heads // ranks * 2, kv_heads * copies // ranks * 2
    return holder(f"rank {rank}", {"u": [tensor(
        "qkv",
        rows("q", (heads * 2, 8), rank * own, own),
        rows("k", (kv_heads * 2, 8), rank // copies * kept, kept),
        rows("v", (kv_heads * 2, 8), rank // copies * kept, kept),
    )]})  # fmt: skip


def layer(name: str, part: Part):
    """A unit of a matrix between two norms."""
    norms = [tensor(n, rows(n, NORM, 0, 5), dtype=DType.F32) for n in ("before", "after")]
    return holder(name, {"u": [norms[0], tensor("w", part), norms[1]]})


def experts(rank: int, *numbers: int):
    """A rank that holds these experts, a page or two each, in this order."""
    units = {
        f"expert.{n}": [tensor(f"expert.{n}.w", rows(f"{n}.w", (5000, 1), 0, 5000))]
        for n in numbers
    }
    return holder(f"rank {rank}", units, shift=rank)


CASES = {
    "rows, one rank to two": (by_rows(8), by_rows(4, 4)[1], [Copy(0, 32, 0, 32)]),
    "rows, two ranks to one": (
        by_rows(4, 4), by_rows(8)[0], [Copy(0, 0, 0, 32), Copy(1, 0, 32, 32)],
    ),
    "rows, two ranks to three": (
        by_rows(6, 6), by_rows(4, 4, 4)[1], [Copy(0, 32, 0, 16), Copy(1, 0, 16, 16)],
    ),
    "rows, three ranks to two, uneven": (
        by_rows(3, 3, 2), by_rows(4, 4)[1], [Copy(1, 8, 0, 16), Copy(2, 0, 16, 16)],
    ),
    "columns, one rank to two": (
        by_columns(8), by_columns(4, 4)[1], [Copy(0, 4, 0, 4, 4, 8, 4)],
    ),
    "columns, two ranks to one": (
        by_columns(4, 4), by_columns(8)[0], [Copy(0, 0, 0, 4, 4, 4, 8), Copy(1, 0, 4, 4, 4, 4, 8)],
    ),
    "columns, two ranks to three": (
        by_columns(6, 6), by_columns(4, 4, 4)[1],
        [Copy(0, 4, 0, 2, 4, 6, 4), Copy(1, 0, 2, 2, 4, 6, 4)],
    ),
    "columns, three ranks to two, uneven": (
        by_columns(3, 3, 2), by_columns(4, 4)[1],
        [Copy(1, 1, 0, 2, 4, 3, 4), Copy(2, 0, 2, 2, 4, 2, 4)],
    ),
    "whole rows that lie apart in the source alone": (
        by_columns(8, row=16), by_columns(8)[0], [Copy(0, 0, 0, 8, 4, 16, 8)],
    ),
    "heads, one rank to two": (
        [attention(0, 1)], attention(1, 2),
        [Copy(0, 32, 0, 32), Copy(0, 80, 32, 16), Copy(0, 112, 48, 16)],
    ),
    "heads, two ranks to one": (
        [attention(0, 2), attention(1, 2)], attention(0, 1),
        [Copy(0, 0, 0, 32), Copy(1, 0, 32, 32), Copy(0, 32, 64, 16), Copy(1, 32, 80, 16),
         Copy(0, 48, 96, 16), Copy(1, 48, 112, 16)],
    ),
    "heads, one rank to four that share two key-value heads": (
        [attention(0, 1)], attention(3, 4),
        [Copy(0, 48, 0, 16), Copy(0, 80, 16, 16), Copy(0, 112, 32, 16)],
    ),
    "heads, four ranks that share two key-value heads to two": (
        [attention(n, 4) for n in range(4)], attention(1, 2),
        [Copy(2, 0, 0, 16), Copy(3, 0, 16, 16), Copy(2, 16, 32, 16), Copy(3, 32, 48, 16)],
    ),
    "norms move whole beside a matrix that is cut": (
        [layer("rank 0", columns("w", DOWN, 0, 4)), layer("rank 1", columns("w", DOWN, 4, 4))],
        layer("rank 0", columns("w", DOWN, 0, 8)),
        [Copy(0, 0, 0, 20), Copy(1, 64, 68, 4, 4, 4, 8), Copy(0, 64, 64, 4, 4, 4, 8),
         Copy(1, 128, 128, 20)],
    ),
    "the same placement": (
        [layer("rank 0", columns("w", DOWN, 0, 4)), layer("rank 1", columns("w", DOWN, 4, 4))],
        layer("rank 1", columns("w", DOWN, 4, 4)),
        [Copy(1, 0, 0, 148, unit="u")],
    ),
    "experts that lie elsewhere": (
        [experts(1, 0, 1), experts(2, 2, 3)], holder("rank 0", {
            f"expert.{n}": [tensor(f"w.{n}", rows(f"{n}.w", (5000, 1), 0, 5000))] for n in (3, 0)
        }),
        [Copy(1, 16384, 0, 5000, unit="expert.3"), Copy(0, 4096, 8192, 5000, unit="expert.0")],
    ),
    "redundant experts": (
        [experts(0, 0, 1), experts(0, 1, 0)], experts(0, 0, 1),
        [Copy(0, 0, 0, 5000, unit="expert.0"), Copy(1, 0, 8192, 5000, unit="expert.1")],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("sources", "target", "copies"), CASES.values(), ids=CASES)
def test_plans(sources, target, copies):
    """The runs are those that one would write down, and they fill the target."""
    plan = Planner(sources).plan(target)
    assert sorted(map(msgspec.structs.astuple, plan)) == sorted(
        map(msgspec.structs.astuple, copies)
    )
    assert [c.target_offset for c in plan] == sorted(c.target_offset for c in plan)
    filled = carry_out(plan, [contents(one) for one in sources], target.manifest.data_bytes)
    assert filled == contents(target)


def test_the_one_that_holds_most_gives():
    """A rank that holds all of a matrix is preferred to several that hold a part each."""
    plan = Planner([*by_rows(4, 4), *by_rows(8)]).plan(by_rows(6, 2)[0])
    assert plan == (Copy(2, 0, 0, 48),)


def test_replicas_share_the_load():
    """Ranks of a target are filled from as many replicas, whether units are whole or cut."""
    cut = Planner([by_rows(8)[0], by_rows(8)[0]])
    assert [cut.plan(rank)[0].source for rank in by_rows(2, 2, 2, 2)] == [0, 1, 0, 1]
    whole = Planner([*by_rows(4, 4), *by_rows(4, 4)])
    assert [whole.plan(by_rows(4, 4)[0])[0].source for _ in range(4)] == [0, 2, 0, 2]


@pytest.mark.parametrize("changes", [{"name": "v"}, {"nbytes": 128}])
def test_a_unit_of_another_name_or_size_gives_its_tensors(changes):
    """Only a unit of the same name and size moves with its digests: its blocks are the same."""
    (source,) = by_rows(8)
    unit = msgspec.structs.replace(source.manifest.units[0], **changes)
    manifest = Manifest(0, source.manifest.data_bytes, (unit,))
    assert Planner([source]).plan(Holder("t", manifest)) == (Copy(0, 0, 0, 64),)


def test_a_matrix_that_is_held_twice():
    """A tied head that is packed, beside the embedding, does not hinder who cuts the latter."""
    embed = tensor("embed", rows("embed", (8, 8), 0, 8))
    head = tensor("head", rows("embed", (8, 8), 0, 8), sealed="packed in tiles")
    target = holder("target", {"u": [tensor("embed", rows("embed", (8, 8), 2, 4))]})
    assert Planner([holder("seed", {"u": [embed, head]})]).plan(target) == (Copy(0, 16, 0, 32),)


def test_shapes_of_other_dimensions():
    """A scalar is one row, a stack of matrices has its first dimension as rows, nothing is none."""
    scalar = TensorSpec("scalar", DType.F32, (), cut=Cut((rows("scalar", (1, 1), 0, 1),)))
    specs = (
        scalar,
        TensorSpec("stack", DType.U8, (1, 2, 4), cut=Cut((rows("stack", (3, 8), 2, 1),))),
        TensorSpec("empty", DType.U8, (0, 4), cut=Cut((rows("stack", (3, 4), 0, 0),))),
        TensorSpec("alias", DType.U8, (1, 2, 4), alias="stack"),
    )
    target = Holder("target", lay_out(0, [UnitSpec("u", specs)]))
    stack = TensorSpec("stack", DType.U8, (3, 2, 4), cut=Cut((rows("stack", (3, 8), 0, 3),)))
    whole = UnitSpec("stacked", (stack,)), UnitSpec("v", (scalar,))
    source = Holder("s", lay_out(0, list(whole)))
    assert Planner([source]).plan(target) == (Copy(0, 4096, 0, 4), Copy(0, 16, 64, 8))


@pytest.mark.parametrize(
    ("copies", "joined"),
    [
        ([Copy(0, 0, 0, 4), Copy(0, 4, 4, 4)], [Copy(0, 0, 0, 8)]),
        ([Copy(0, 0, 0, 4), Copy(1, 4, 4, 4)], [Copy(0, 0, 0, 4), Copy(1, 4, 4, 4)]),
        ([Copy(0, 0, 0, 4), Copy(0, 5, 4, 4)], [Copy(0, 0, 0, 4), Copy(0, 5, 4, 4)]),
        ([Copy(0, 0, 0, 4, 3, 4, 4)], [Copy(0, 0, 0, 12)]),
        ([Copy(0, 0, 0, 4, 1, 9, 8)], [Copy(0, 0, 0, 4)]),
        ([Copy(0, 0, 0, 4, 2, 9, 8), Copy(0, 18, 16, 4, 1, 9, 8)], [Copy(0, 0, 0, 4, 3, 9, 8)]),
        ([Copy(0, 0, 0, 4, 2, 9, 8), Copy(0, 4, 4, 4, 2, 9, 8)], [Copy(0, 0, 0, 8, 2, 9, 8)]),
        *(
            ([Copy(0, 0, 0, 4, 2, 9, 8), other], [Copy(0, 0, 0, 4, 2, 9, 8), other])
            for other in (
                Copy(0, 4, 4, 4, 2, 9, 9),
                Copy(0, 4, 4, 4, 3, 9, 8),
                Copy(0, 18, 16, 4, 2, 9, 9),
                Copy(0, 18, 16, 3, 2, 9, 8),
            )
        ),
        ([Copy(0, 0, 0, 4, 2, 8, 8), Copy(0, 4, 4, 4, 2, 8, 8)], [Copy(0, 0, 0, 16)]),
    ],
)
def test_runs_are_joined(copies, joined):
    """What lies side by side, or at the same distance, in both arenas becomes one copy."""
    assert merged(reversed(copies)) == joined
