"""Records to messages and back, and what a peer may send instead."""

import pytest
from cutting import matrices, placements
from fakes import (
    instance,
    lay_out_bytes,
    random_bytes,
    replace,
    seam_layout,
    transfer_state,
    verified,
)
from hypothesis import given
from hypothesis import strategies as st

from engine_service.errors import InvalidRequest as EngineInvalidRequest
from engine_service.rpc import convert as engine_convert
from relay_service.core.format import Placement
from relay_service.core.instance import Artifact, Filling, Reader, State, Weights
from relay_service.core.layout import check
from relay_service.core.logs import MAX_TRANSFER_CHARS
from relay_service.core.manifest import Manifest
from relay_service.core.pull_report import PullOptions
from relay_service.core.transfer_state import MAX_REASON_CHARS, MAX_STEPS
from relay_service.errors import InvalidRequest, ManifestError
from relay_service.rpc import convert, convert_manifest, convert_transfer
from seedrelay.v1 import relay_pb2, weights_pb2


@pytest.mark.parametrize("state", State)
def test_an_instance_round_trips(state):
    """An announced instance arrives as it was sent, in every state."""
    sent = instance(
        state=state,
        placement=Placement(2, 3, 4, "ab" * 8),
        weights=Weights("v7", "ab" * 16, 9),
        artifacts=(Artifact("config.json", 2, "0" * 64),),
        leases=4,
        readers=(Reader("target", "abc123", 1 << 40),),
        filling=Filling("tiny", "v8", "cd" * 16, 1 << 41, "seed"),
    )
    assert convert.instance_from_proto(convert.instance_to_proto(sent)) == sent


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"outcome": "NoSource", "bytes_per_second": 0},
        {"bytes_per_second": 1, "bytes_total": 1 << 62, "age_seconds": 1e9, "path": ()},
    ],
)
def test_a_transfer_round_trips(changes):
    """What is told of a transfer arrives as it was sent, and how long it takes with it."""
    sent = transfer_state(**changes)
    message = convert_transfer.to_proto(sent)
    assert convert_transfer.from_proto(message) == sent
    assert message.HasField("remaining") == (sent.remaining_seconds is not None)


def test_a_transfer_that_is_told_at_length():
    """Of what another relay tells only so much is kept as can be shown."""
    message = convert_transfer.to_proto(transfer_state())
    message.transfer = "\x1b[2J" + "a" * 100
    message.path.extend(weights_pb2.PathStep(reason="r" * 10_000) for _ in range(1000))
    kept = convert_transfer.from_proto(message)
    assert kept.transfer.isalnum()
    assert len(kept.transfer) <= MAX_TRANSFER_CHARS
    assert (len(kept.path), {len(step.reason) for step in kept.path}) == (
        MAX_STEPS, {MAX_REASON_CHARS},
    )  # fmt: skip


def test_a_manifest_round_trips():
    """A manifest with every kind of tensor arrives as it was sent, verified or not."""
    layout = seam_layout(rank=2)
    for sent in (layout, verified(layout, random_bytes(layout)), lay_out_bytes([])):
        pages = list(convert_manifest.manifest_pages(sent))
        assert convert_manifest.manifest_from_pages(sent.rank, pages) == sent


@given(st.data(), matrices, st.sampled_from(["", "packed in tiles"]))
def test_cuts_round_trip(data, model, sealed):
    """What ranks say of what they hold arrives as it was sent, however they are cut."""
    for one in data.draw(placements(model)):
        units = [
            replace(unit, tensors=tuple(
                replace(t, cut=replace(t.cut, sealed=sealed)) for t in unit.tensors
            ))
            for unit in one.manifest.units
        ]  # fmt: skip
        sent = Manifest(one.manifest.rank, one.manifest.data_bytes, tuple(units))
        check(sent)
        pages = list(convert_manifest.manifest_pages(sent))
        assert convert_manifest.manifest_from_pages(sent.rank, pages) == sent


def test_how_a_source_lies_otherwise_round_trips():
    """How weights were cut anew arrives at the engine, and from there at its callers."""
    sent = weights_pb2.PullReport(
        path=[weights_pb2.PathStep(source_instance="a", recut="tensor_parallel_size: 2 and 1")],
        weights_digest="mine", source_weights_digest="its",
    )  # fmt: skip
    shown = engine_convert.report_to_proto(engine_convert.report_from_proto(sent), State.READY)
    assert list(shown.path) == list(sent.path)
    assert (shown.weights_digest, shown.source_weights_digest) == ("mine", "its")


def test_a_fingerprint_is_not_taken_on_trust():
    """What a format is called does not matter, only its facts do."""
    message = convert.format_to_proto(instance().format)
    message.fingerprint = "forged"
    assert convert.format_from_proto(message).fingerprint == instance().format.fingerprint


small = st.integers(-(1 << 63), (1 << 63) - 1)
parts = st.builds(
    weights_pb2.TensorPart,
    logical=st.text(max_size=2),
    whole_rows=small,
    whole_columns=small,
    first_row=small,
    row_count=small,
    first_column=small,
    column_count=small,
)
tensors = st.builds(
    weights_pb2.TensorEntry,
    name=st.text(max_size=5),
    kind=st.sampled_from(["parameter", "weight", ""]),
    dtype=st.sampled_from(["u8", "bf16", "f128", "", "U8", "x" * 100]),
    shape=st.lists(small, max_size=3),
    strides=st.lists(small, max_size=3),
    offset=small,
    byte_count=small,
    alias=st.text(max_size=2),
    sealed=st.text(max_size=2),
    parts=st.lists(parts, max_size=3),
)
units = st.builds(
    weights_pb2.WeightUnit,
    name=st.text(max_size=5),
    offset=small,
    byte_count=small,
    tensors=st.lists(tensors, max_size=3),
    block_digests=st.lists(st.binary(max_size=17), max_size=3),
)


pages = st.builds(
    relay_pb2.GetManifestResponse, data_bytes=small, units=st.lists(units, max_size=3)
)


@given(st.lists(pages, max_size=3))
def test_any_manifest_is_checked_or_refused(sent):
    """Whatever pages a peer sends, they are a manifest that holds together or a `ManifestError`."""
    try:
        manifest = convert_manifest.manifest_from_pages(0, sent)
        check(manifest)
    except ManifestError:
        return
    assert all(unit.offset + unit.nbytes <= manifest.data_bytes for unit in manifest.units)


def test_an_unknown_dtype_is_named():
    """A dtype that we do not know is refused with the tensor's name."""
    tensor = weights_pb2.TensorEntry(name="layer.0.qkv", dtype="f4_unheard_of")
    unit = weights_pb2.WeightUnit(name="layer.0", tensors=[tensor])
    page = relay_pb2.GetManifestResponse(units=[unit])
    with pytest.raises(ManifestError, match=r"tensor layer\.0\.qkv: unknown dtype 'f4_unheard_of'"):
        convert_manifest.manifest_from_pages(0, [page])


@pytest.mark.parametrize(
    ("from_proto", "refusal"),
    [
        (convert.options_from_proto, InvalidRequest),
        (engine_convert.options_from_proto, EngineInvalidRequest),
    ],
    ids=["relay", "engine"],
)
class TestOptions:
    """How to pull, as both services read it."""

    def test_they_round_trip(self, from_proto, refusal):
        """Options arrive as they were sent; `auto` means no choice."""
        sent = PullOptions(
            source_instance="a", transport="shm", rate_limit_bytes_per_second=5, timeout_seconds=1.5
        )
        assert from_proto(engine_convert.options_to_proto(sent)) == sent
        auto = engine_convert.options_to_proto(PullOptions(transport="auto"))
        assert from_proto(auto) == PullOptions()

    @pytest.mark.parametrize(
        "fields",
        [
            {"rate_limit_bytes_per_second": -1},
            {"timeout": {"seconds": -1}},
            {"timeout": {"seconds": 1 << 62}},
            {"timeout": {"seconds": -(1 << 62)}},
            {"timeout": {"seconds": 1, "nanos": -(1 << 31)}},
        ],
    )
    def test_senseless_ones_are_refused(self, from_proto, refusal, fields):
        """A limit or a time that makes no sense is an invalid request."""
        with pytest.raises(refusal) as refused:
            from_proto(weights_pb2.PullOptions(**fields))
        assert refused.value.details["field"]
