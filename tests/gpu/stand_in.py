"""Stands in for msgspec where it isn't installed, as far as records need it.

The checks on a device shall need nothing but Python, torch, numpy and xxhash. Records become
dataclasses; nothing is encoded, and whoever tries fails.
"""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any


class Struct:
    """A record: a dataclass with the options of a `msgspec.Struct` that matter here."""

    def __init_subclass__(
        cls, *, frozen: bool = False, kw_only: bool = False, **_options: Any
    ) -> None:
        """Makes a dataclass of the subclass."""
        for name, value in list(vars(cls).items()):
            if isinstance(value, list | dict) and name in cls.__annotations__:
                setattr(cls, name, dataclasses.field(default_factory=type(value)))
        dataclasses.dataclass(frozen=frozen, kw_only=kw_only)(cls)
        cls.__struct_fields__ = tuple(field.name for field in dataclasses.fields(cls))


class _Codec:
    """Takes what an encoder or decoder is made of, and can do neither."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass


class MsgspecError(Exception):
    """Never raised."""


def install() -> bool:
    """Puts the stand-in where it is needed; returns whether it stands there."""
    try:
        import msgspec
    except ImportError:
        msgspec = sys.modules["msgspec"] = types.ModuleType("msgspec")
        msgspec.Struct = Struct
        msgspec.Meta = lambda **_options: None
        msgspec.MsgspecError = msgspec.DecodeError = msgspec.ValidationError = MsgspecError
        msgspec.structs = types.SimpleNamespace(replace=dataclasses.replace)
        msgspec.msgpack = msgspec.json = types.SimpleNamespace(Encoder=_Codec, Decoder=_Codec)
    return msgspec.Struct is Struct
