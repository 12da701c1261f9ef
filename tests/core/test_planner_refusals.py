"""What cannot be planned, and the words for it."""

import msgspec
import pytest
from cutting import carry_out, columns, contents, holder, rows, tensor

from relay_service.core.copies import Copy
from relay_service.core.cut import Cut, Part
from relay_service.core.dtypes import DType
from relay_service.core.holder import Holder
from relay_service.core.layout import TensorSpec, UnitSpec, lay_out
from relay_service.core.planner import Planner
from relay_service.errors import FormatMismatch, ManifestError, PartsMissing, RelayError

WHOLE = (8, 8)
UPPER, LOWER = rows("w", WHOLE, 0, 4), rows("w", WHOLE, 4, 4)
TILES = "packed in tiles"


def one(name: str, *parts: Part, **how):
    """A rank whose only tensor is made of these parts."""
    return holder(name, {"u": [tensor("matrix", *parts, **how)]})


@pytest.mark.parametrize(
    ("source", "target", "kind", "words"),
    [
        (
            one("seed rank 0", UPPER, dtype=DType.F16), one("target", UPPER, dtype=DType.BF16),
            FormatMismatch, "matrix: dtype of w: seed rank 0 f16, target bf16",
        ),
        (
            one("seed rank 0", rows("w", (9, 8), 0, 8)), one("target", UPPER),
            FormatMismatch, r"matrix: whole shape of w: seed rank 0 \(9, 8\), target \(8, 8\)",
        ),
        (
            one("seed rank 0", rows("w", WHOLE, 0, 8), sealed=TILES),
            one("target", UPPER, sealed=TILES),
            FormatMismatch, "matrix: no source .* matrix cannot be cut anew: it is packed in tiles",
        ),
        (
            one("seed rank 0", rows("w", WHOLE, 0, 8)),
            one("target", UPPER, sealed="blocks of 128 by 128, and 4 rows are held"),
            FormatMismatch, "cannot be cut anew: it is blocks of 128 by 128, and 4 rows are held",
        ),
        (
            one("seed rank 0", UPPER, sealed=TILES), one("target", rows("w", WHOLE, 2, 1)),
            FormatMismatch, "matrix: no source .* matrix cannot be cut anew: it is packed in tiles",
        ),
        (
            one("seed rank 0", rows("w", WHOLE, 0, 6)), one("target", LOWER),
            PartsMissing, r"matrix: w: rows 6\.\.7 of 8, columns 0\.\.7 of 8$",
        ),
        (
            one("seed rank 0", columns("w", WHOLE, 3, 4)), one("target", UPPER),
            PartsMissing,
            r"w: rows 0\.\.3 of 8, columns 0\.\.2 of 8; .* rows 0\.\.3 of 8, columns 7\.\.7 of 8$",
        ),
        (
            one("seed rank 0", rows("w", WHOLE, 0, 8)), one("target", rows("bias", (8, 1), 2, 4)),
            PartsMissing, r"matrix: bias: rows 2\.\.5 of 8$",
        ),
        (
            one("seed rank 0", UPPER),
            one("target", rows("q", WHOLE, 0, 1), rows("k", WHOLE, 0, 1), sealed=TILES),
            PartsMissing, r"matrix: q: rows 0\.\.0 .* matrix: k: rows 0\.\.0",
        ),
    ],
)  # fmt: skip
def test_refusals(source, target, kind, words):
    """The tensor, the rows and columns, both sides and the reason are named, and what to do."""
    with pytest.raises(RelayError, match=words) as refused:
        Planner([source]).plan(target)
    assert type(refused.value) is kind
    assert refused.value.details["hint"]


def test_everything_that_is_missing_is_named():
    """The error holds all that is missing in all units, its message the first few and how many."""
    names = [f"expert.{n}" for n in range(6)]
    target = holder("target", {n: [tensor(n, rows(f"{n}.w", WHOLE, 0, 8))] for n in names})
    source = one("seed rank 0", rows("expert.2.w", WHOLE, 0, 8))
    with pytest.raises(PartsMissing, match=r"expert\.4\.w.*; 5 in all$") as refused:
        Planner([source]).plan(target)
    missing = [words.split(":")[0] for words in refused.value.missing]
    assert missing == [n for n in names if n != "expert.2"]
    assert "expert.5" not in refused.value.message


def test_sealed_tensors_move_to_where_they_are_cut_the_same():
    """Packed tiles move whole to any rank that holds the same rows, beside what is cut anew."""
    packed = tensor("packed", UPPER, rows("v", WHOLE, 0, 2), sealed=TILES)
    source = holder("seed rank 0", {"u": [packed, tensor("w", rows("x", WHOLE, 0, 8))]})
    target = holder("target", {"u": [tensor("w", rows("x", WHOLE, 6, 2)), packed]})
    plan = Planner([source]).plan(target)
    assert plan == (Copy(0, 112, 0, 16), Copy(0, 0, 64, 54))
    filled = carry_out(plan, [contents(source)], target.manifest.data_bytes)
    assert filled == contents(target)


def test_sealed_tensors_of_equal_size_are_told_apart():
    """Other rows of the same matrix, and the same rows sealed otherwise, do not stand in."""
    source = one("seed rank 0", UPPER, sealed=TILES)
    for target in (one("t", LOWER, sealed=TILES), one("t", UPPER, sealed="packed in strips")):
        with pytest.raises(FormatMismatch):
            Planner([source]).plan(target)


SPEC = TensorSpec("matrix", DType.U8, (4, 8))


@pytest.mark.parametrize(
    ("spec", "parts", "words"),
    [
        (SPEC, (rows("w", WHOLE, 0, 3),), "its parts are not its 4 rows"),
        (SPEC, (columns("w", (4, 8), 0, 4),), "a part has not its 8 columns"),
        (SPEC, (rows("w", WHOLE, 5, 4),), r"'w' has no rows \(5, 4\)"),
        (SPEC, (rows("w", WHOLE, -1, 4),), r"'w' has no rows \(-1, 4\)"),
        (SPEC, (Part("w", WHOLE, (0, 4), (4, 8)),), r"columns \(4, 8\)"),
        (SPEC, (UPPER, rows("w", WHOLE, 8, -4), UPPER), r"'w' has no rows \(8, -4\)"),
        (SPEC, (rows("w", (1 << 60, 8), 0, 4),), "'w' has no rows"),
        (TensorSpec("matrix", DType.U8, (4, 8), strides=(1, 4)), (UPPER,), "scatter its rows"),
        (TensorSpec("matrix", DType.U8, (4, 8), strides=(4, 1)), (UPPER,), "scatter its rows"),
    ],
)
def test_parts_that_contradict_their_tensor(spec, parts, words):
    """Parts that aren't the rows of their tensor are refused with the manifest, by name."""
    with pytest.raises(ManifestError, match=f"matrix: .*{words}"):
        lay_out(1, [UnitSpec("u", (msgspec.structs.replace(spec, cut=Cut(parts)),))])


def test_a_tensor_that_does_not_say_what_it_holds():
    """It is refused by name at either side; of a sealed one only the parts must make sense."""
    silent = Holder("old rank 0", lay_out(0, [UnitSpec("u", (SPEC,))]))
    with pytest.raises(FormatMismatch, match="old rank 0: matrix does not say"):
        Planner([silent])
    with pytest.raises(FormatMismatch, match="old rank 0: matrix does not say"):
        Planner([]).plan(silent)
    with pytest.raises(ManifestError, match="it is sealed and has no parts"):
        lay_out(0, [UnitSpec("u", (msgspec.structs.replace(SPEC, cut=Cut((), TILES)),))])
