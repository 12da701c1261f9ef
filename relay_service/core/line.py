"""The line through which the blocks of a pull come, and who closes a gap in it. Plain Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from relay_service.core.choice import nearest
from relay_service.core.instance import Filling, Instance
from relay_service.errors import SourceFailed


class Line:
    """Whom the leading source of one pull reads from, directly or not.

    Where that source dies, the next one has a free seat, and whoever reads on need not know.
    """

    def __init__(self) -> None:
        self._leading: Instance | None = None
        """When it has failed, who took its place."""
        self._upstream: Sequence[str] = ()

    def leads(self, source: Instance, upstream: Sequence[str]) -> None:
        """Takes note of which source leads, and through whom it is filled, the nearest first."""
        self._leading, self._upstream = source, tuple(upstream)

    def failed(self, source: Instance, error: Exception) -> None:
        """Forgets the line where its leading source was left, and has not gone."""
        if source is self._leading and not isinstance(error, SourceFailed | OSError):
            self._upstream = ()

    def close_gap(
        self, known: Sequence[Instance], may_be: Callable[[Instance], bool]
    ) -> Instance | None:
        """Returns who takes the place of the leading source that has gone; each one once."""
        of = self._leading
        if of is None:
            return None
        others = [filled_like(other, of) for other in known if other.instance in self._upstream]
        there = {
            other.instance: other
            for other in others
            if other.weights.digest == of.weights.digest and may_be(other)
        }
        name = nearest(self._upstream, there)
        self._upstream = self._upstream[self._upstream.index(name) + 1 :] if name else ()
        self._leading = there.get(name)
        return self._leading


def filled_like(other: Instance, source: Instance) -> Instance:
    """Returns another one as it is read while it is filled with what a source has.

    It may have begun just now, and nobody has heard yet at which epoch.
    """
    if not other.state.fillable:
        return other
    had = source.weights
    coming = Filling(source.model, had.version, had.digest, 0, source.instance)
    return msgspec.structs.replace(other, filling=coming).as_source()
