"""Says which instances could fill a target, and why the others could not. Plain Python."""

from __future__ import annotations

import msgspec

from relay_service.core.choice import reads_from
from relay_service.core.format import Format, Placement
from relay_service.core.instance import Instance, State
from relay_service.errors import Ambiguous, FormatMismatch


class Target(msgspec.Struct, frozen=True):
    """What a target is: its name and what its bytes mean."""

    instance: str = ""
    format: Format | None = None
    """Without it, every complete holder fits."""
    placement: Placement | None = None


class Match(msgspec.Struct, frozen=True):
    """One instance and whether it could fill the target."""

    instance: Instance
    reason: str
    """Why it does not fit; empty if it fits."""
    recut: str = ""
    """How its ranks are placed otherwise, in words: then its weights are cut anew on the way.

    Whether that is possible its manifests decide, and so whoever reads them.
    """

    @property
    def fits(self) -> bool:
        """Whether it could fill the target."""
        return not self.reason


def match(target: Target, instances: list[Instance]) -> list[Match]:
    """Judges every instance but the target.

    Those that fit come first, of them those that are placed like the target, then the
    least loaded.
    """
    below = reads_from(target.instance, instances)
    matches = [
        Match(
            instance,
            f"it reads from {target.instance} itself" * (instance.instance in below)
            or misfit(target, instance),
            placed_otherwise(target, instance),
        )
        for instance in instances
        if instance.instance != target.instance
    ]
    return sorted(
        matches, key=lambda m: (not m.fits, bool(m.recut), m.instance.leases, m.instance.instance)
    )


def misfit(target: Target, source: Instance) -> str:
    """Says the first reason why `source` could not fill `target`; empty if it could.

    An incomplete one fills a target as long as it's filled itself, and only one that is placed
    like it: of what is cut anew each block needs many, and some would always be missing.
    """
    if source.filling and source.state.fillable and target.format is not None:
        otherwise = placed_otherwise(target, source)
        return otherwise or source.format.difference(target.format)
    if source.state is State.UPDATING:
        return f"state: {source.state} is changing its weights, and can be asked when it is through"
    if not source.state.holds_weights or not source.weights.digest:
        return f"state: {source.state} holds no complete weights"
    return source.format.difference(target.format) if target.format is not None else ""


def placed_otherwise(target: Target, source: Instance) -> str:
    """Says the first difference of the placements in words; empty if there is none."""
    return source.placement.difference(target.placement) if target.placement is not None else ""


def refuse_several_models(fitting: list[Instance]) -> None:
    """Raises `Ambiguous`: a base model and its fine-tune fit each other; one must be named."""
    models = sorted({i.model for i in fitting})
    if len(models) > 1 and len({i.weights.digest for i in fitting}) > 1:
        raise Ambiguous(
            f"several models fit: {', '.join(models)}",
            field="source_instance", expected="one of them", hint="name one with --from",
        )  # fmt: skip


def refuse_misfits(complete: list[Match]) -> None:
    """Raises `FormatMismatch` where there are complete holders, none of which fits."""
    if complete:
        first = complete[0]
        raise FormatMismatch(
            f"{first.instance.instance} does not fit: {first.reason}",
            field=first.reason.split(":", 1)[0], source=first.instance.instance,
            hint="start the target like the seed, or name another source",
        )  # fmt: skip


def waiting_for(wanted: list[Match], source_instance: str) -> str:
    """Says what a pull waits for, of those instances that it may take."""
    if not wanted:
        return f"waiting for {source_instance or 'a source'}"
    states = ", ".join(f"{m.instance.instance} is {m.instance.state}" for m in wanted)
    loading = any(m.instance.state is not State.FAILED for m in wanted)
    return f"waiting for a source: {states}" if loading else f"no source: {states}"
