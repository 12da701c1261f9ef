"""How a request of either protocol becomes an answer: gate, conversion, engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any

from engine_service.core.answers import Piece, answer
from engine_service.core.instance import Instance
from engine_service.core.request import GenerationRequest
from engine_service.core.tokenizer import TextCodec

FromProto = Callable[[Any, TextCodec], tuple[GenerationRequest, int]]
"""Checks and tokenizes a message; returns what is wanted and how many answers."""


async def admit(
    instance: Instance, name: str, from_proto: FromProto, message: Any
) -> tuple[GenerationRequest, AsyncGenerator[Piece]]:
    """Returns a checked request and the pieces of its answers; asking for the first submits it.

    Raises `NotReady`, or `InvalidRequest` by field.
    """
    codec = instance.ready_codec()
    # Tokenizing a long text or compiling a grammar may take a second. A caller who leaves
    # meanwhile may abort by name and never ask again.
    with instance.engine.expecting(name):
        wanted, count = await asyncio.to_thread(from_proto, message, codec)
        instance.ready_codec()
    return wanted, answer(instance.engine, wanted, codec.detokenizer, count)
