"""How a request of either protocol becomes an answer: gate, lock, conversion, scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

from engine_service.core.answers import Piece, answer
from engine_service.core.instance import Instance
from engine_service.core.request import Finish, GenerationRequest
from engine_service.core.tokenizer import TextCodec

FromProto = Callable[[Any, TextCodec], tuple[GenerationRequest, int]]
"""Checks and tokenizes a message; returns what is wanted and how many answers."""


@asynccontextmanager
async def admitted(
    instance: Instance, name: str, from_proto: FromProto, message: Any
) -> AsyncIterator[tuple[GenerationRequest, AsyncGenerator[Piece]]]:
    """Submits a request; yields it, checked, and the pieces of its answers.

    Leaving frees their KV and their slots. Raises `NotReady`, `InvalidRequest` by field, or
    what `Engine.submit` does.
    """
    engine = instance.engine
    codec = instance.ready_codec()
    # A caller who leaves before it is submitted may abort it by name and never ask again.
    with engine.gate.expecting(name) as ticket:
        async with instance.pauser.admission(ticket):
            codec = instance.codec or codec  # another one may have come with new weights
            # Tokenizing a long text or compiling a grammar may take a second.
            wanted, count = await asyncio.to_thread(from_proto, message, codec)
            if not ticket.aborted:
                instance.ready_codec()
            sequences = engine.submit(wanted, count, ticket)
    try:
        async with aclosing(answer(engine, wanted, sequences, codec.detokenizer)) as pieces:
            yield wanted, pieces
    finally:
        for sequence in sequences:
            engine.end(sequence, Finish.ABORT)
