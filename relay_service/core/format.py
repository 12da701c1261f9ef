"""What the bytes of an arena mean, as facts that two instances can compare."""

from __future__ import annotations

import hashlib

import msgspec


class Placement(msgspec.Struct, frozen=True):
    """Where the ranks of an instance lie."""

    tensor_parallel_size: int = 1
    expert_parallel_size: int = 1
    redundant_experts: int = 0
    expert_map: str = ""
    """Digest of which slot holds which expert; empty for a model without experts."""

    def difference(self, target: Placement) -> str:
        """Says in words how `target` lies otherwise; empty when it doesn't."""
        for name in self.__struct_fields__:
            seed, mine = getattr(self, name), getattr(target, name)
            if seed != mine:
                return f"{name}: seed {seed}, target {mine}"
        return ""


class Format(msgspec.Struct, frozen=True):
    """Facts in a fixed order; equal facts mean interchangeable bytes."""

    facts: tuple[tuple[str, str], ...]

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the facts, in hexadecimal."""
        return hashlib.sha256(msgspec.json.encode(self.facts)).hexdigest()

    def difference(self, target: Format) -> str:
        """Says the first difference in words; empty when there is none.

        `self` is the seed's format: `dtype: seed bfloat16, target float32`.
        """
        mine, theirs = dict(self.facts), dict(target.facts)
        for name in dict.fromkeys([*mine, *theirs]):
            seed, other = mine.get(name, "absent"), theirs.get(name, "absent")
            if seed != other:
                return f"{name}: seed {seed}, target {other}"
        return "" if self.facts == target.facts else "facts: same values in another order"
