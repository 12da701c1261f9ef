"""Small files that pass from holder to holder: by digest, from whoever has the very same."""

import asyncio
import hashlib

import pytest
from fakes import eventually, lay_out_bytes, random_bytes, replace

from engine_service.core.model_files import choose_offer
from engine_service.core.ports import FillReport
from engine_service.errors import RelayUnreachable
from engine_service.rpc.relay_link import GrpcRelayLink
from relay_service.core.instance import Artifact
from relay_service.core.manifest import BLOCK_BYTES
from relay_service.core.pull_report import PathStep
from seedrelay.v1 import weights_pb2

FILES = {"config.json": b"{}", "tokenizer.json": bytes(range(256)) * 5000}
TOKENIZER = hashlib.sha256(FILES["tokenizer.json"]).hexdigest()


@pytest.fixture
async def link_to(fleet):
    """Makes links of engines to relays, and closes them."""
    links = []

    def make(relay) -> GrpcRelayLink:
        links.append(GrpcRelayLink(relay.address))
        return links[-1]

    yield make
    await asyncio.gather(*(link.close() for link in links))


async def offers(link, *names: str) -> dict:
    """Waits until these offer files; returns all instances by name."""
    found = {}

    async def are_there() -> bool:
        found.clear()
        found.update({one.instance: one for one in await link.offers()})
        return all(name in found and found[name].artifacts for name in names)

    await eventually(are_there)
    return found


def lie(relay, name: str, data: bytes) -> None:
    """Has a relay give other bytes than those that it announces."""
    artifacts = relay.holdings.get(name).artifacts
    artifacts[TOKENIZER] = ("tokenizer.json", data)


async def test_an_incomplete_target_passes_them_on(fleet, link_to):
    """The seed has gone, and the target that it was filling has what another target begins with."""
    fleet.layout = lay_out_bytes([4 * BLOCK_BYTES])
    fleet.data = random_bytes(fleet.layout)
    here = await fleet.relay()
    there = await fleet.relay(join=here.address)
    seed = await fleet.seed(here, artifacts=FILES)
    await fleet.dummy(there, "middle", artifacts=FILES)
    digest = seed.memory.digest
    slowly = weights_pb2.PullOptions(rate_limit_bytes_per_second=1)
    pulling = fleet.client(there).pull("middle", slowly)
    await anext(pulling)
    await eventually(lambda: there.holdings.get("middle").offered.now)
    link = link_to(here)
    await eventually(lambda: any(one.filling for one in here._fleet.known()))
    report = FillReport(path=[PathStep("middle", "")], source_weights_digest=digest)
    assert await link.source_files(report) == FILES
    seed.leave()
    await eventually(lambda: len(here._fleet.known()) == 1)
    known = await link.offers()
    offer = choose_offer(known, "")
    assert offer.instance == "middle"
    assert await link.fetch(offer, known) == FILES
    await pulling.aclose()


async def test_a_lie_is_refused_and_the_file_fetched_elsewhere(fleet, link_to):
    """Wrong bytes are never taken; another holder of the very same file gives it."""
    here = await fleet.relay()
    there = await fleet.relay(join=here.address)
    await fleet.seed(here, "liar", artifacts=FILES)
    await fleet.seed(there, "other", artifacts=FILES | {"tokenizer.json": b"another one"})
    link = link_to(here)
    known = await offers(link, "liar", "other")
    lie(here, "liar", FILES["tokenizer.json"][:-1] + b"!")
    with pytest.raises(RelayUnreachable, match=r"tokenizer\.json does not match its SHA-256"):
        await link.fetch(known["liar"], list(known.values()))
    await fleet.seed(there, "honest", artifacts=FILES)
    known = await offers(link, "liar", "other", "honest")
    assert await link.fetch(known["liar"], list(known.values())) == FILES


async def test_a_file_of_another_size(fleet, link_to):
    """No more is taken than was announced, however much comes."""
    relay = await fleet.relay()
    await fleet.seed(relay, artifacts=FILES)
    link = link_to(relay)
    (seed,) = (await offers(link, "seed")).values()
    short = replace(seed, artifacts=(Artifact("tokenizer.json", 1000, TOKENIZER),))
    with pytest.raises(RelayUnreachable, match="longer than 1000 bytes"):
        await link.fetch(short)


async def test_the_holder_has_gone(fleet, link_to):
    """A relay that does not answer is left for another holder."""
    here = await fleet.relay()
    there = await fleet.relay(join=here.address)
    await fleet.seed(here, "here", artifacts=FILES)
    await fleet.seed(there, "there", artifacts=FILES)
    link = link_to(here)
    known = await offers(link, "here", "there")
    await fleet.stop(there)
    with pytest.raises(RelayUnreachable, match="cannot be reached"):
        await link.fetch(known["there"])
    assert await link.fetch(known["there"], list(known.values())) == FILES


async def test_names_that_do_not_travel(fleet, link_to):
    """What is no small file of a model is not even asked for."""
    relay = await fleet.relay()
    await fleet.seed(relay, artifacts=FILES)
    link = link_to(relay)
    (seed,) = (await offers(link, "seed")).values()
    more = (*seed.artifacts, Artifact("../model.py", 2, "0" * 64))
    assert await link.fetch(replace(seed, artifacts=more)) == FILES
