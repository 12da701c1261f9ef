"""Every family in every format over ranks placed in every way: the table, and a sample of it."""

from collections.abc import Sequence
from typing import NamedTuple

import oracles
from sampling import covering, pairs

from engine_service.core.expert_map import Slots
from engine_service.device.config import ModelConfig
from engine_service.device.formats.layouts import LAYOUTS
from relay_service.core.dtypes import DType


class Placed(NamedTuple):
    """How the ranks of an instance are placed."""

    tp: int = 1
    ep: int = 1
    redundant: int = 0
    mapped: bool = False
    """Whether experts lie otherwise than in their order."""

    def settings(self, config: ModelConfig) -> dict[str, object]:
        """Returns what a rank is told of it, beside how many there are."""
        return {"redundant_experts": self.redundant, "expert_map": self._map(config)}

    def _map(self, config: ModelConfig) -> dict[int, Slots]:
        """Deals experts out to the groups in turns, the last group first."""
        if not self.mapped or config.moe is None:
            return {}
        dealt = tuple(
            tuple(range(group, config.moe.experts, self.ep)) for group in reversed(range(self.ep))
        )
        return {layer: dealt for layer in range(config.layers) if not config.is_dense(layer)}


DENSE = {"alone": Placed(), "tp2": Placed(2)}
SPARSE = {
    "ep2": Placed(1, 2), "tp2-ep2": Placed(2, 2), "ep2-replicas": Placed(1, 2, redundant=2),
    "ep2-mapped": Placed(1, 2, mapped=True),
}  # fmt: skip
PLACES = DENSE | SPARSE
UNCUT = {"int4": "cannot be cut anew: it is packed in groups of .* from its own first"}
"""Formats of which no other number of tensor-parallel ranks can be cut, and why not."""

_SIZES = {
    "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 128,
    "intermediate_size": 256, "vocab_size": 256,
}  # fmt: skip
_EXPERT_SIZES = ("moe_intermediate_size", "shared_expert_intermediate_size")


class Cell(NamedTuple):
    """A family in a format; how an instance is placed, and how another one is."""

    family: str
    held: str
    placed: str
    other: str

    @property
    def dtype(self) -> str:
        """The widest type that the format serves."""
        return "float32" if DType.F32 in LAYOUTS[self.held].types else "bfloat16"

    @property
    def exact(self) -> bool:
        """Whether ranks that are placed otherwise compute the same, but for the last few bits."""
        return self.dtype == "float32"

    @property
    def sealed(self) -> str:
        """Why the other one cannot be cut out of the first one; empty if it can."""
        same = PLACES[self.placed].tp == PLACES[self.other].tp
        return "" if same else UNCUT.get(self.held, "")


def sparse(family: str) -> bool:
    """Returns whether a family has experts."""
    return "num_experts_per_tok" in oracles.FAMILIES[family].settings


def sizes(family: str) -> dict[str, int]:
    """Returns sizes of which two ranks hold parts that end between two tiles of any format.

    Of every other family both hold the same key-value head.
    """
    settings = oracles.FAMILIES[family].settings
    heads = 1 + list(oracles.FAMILIES).index(family) % 2
    experts = {name: 256 for name in _EXPERT_SIZES if name in settings}
    return _SIZES | {"num_key_value_heads": heads} | experts


def table() -> list[Cell]:
    """Lists all cells; how the other is placed goes round for every family and every format."""
    cells = []
    for row, family in enumerate(oracles.FAMILIES):
        places = list(PLACES if sparse(family) else DENSE)
        for column, held in enumerate(LAYOUTS):
            for placed in places:
                others = [place for place in places if place != placed]
                cells.append(Cell(family, held, placed, others[(row + column) % len(others)]))
    return cells


def sample(rows: Sequence[Cell]) -> set[Cell]:
    """Chooses cells of families, not of their variants such as `qwen3, biased`.

    Every family is there, and each pair of format, place and other place, and of these with
    whether there are experts. Pairs of a family and anything else would be twice as many.
    """
    plain = [cell for cell in rows if "," not in cell.family]
    return set(covering(plain, {cell: _traits(cell) for cell in plain}))


def _traits(cell: Cell) -> set[object]:
    columns = sparse(cell.family), cell.held, cell.placed, cell.other
    return {cell.family, *pairs(columns)}
