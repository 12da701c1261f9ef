"""Updates over real sockets: an engine without a model, ranks without processes."""

import asyncio
import json

import grpc
import pytest
from engines import tokens
from fakes import eventually
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc
from updates import PUSHED, Stand, contents_of

from clients.engine_updates import ELEMENT_BYTES, PIECE_BYTES, Tensor, _messages
from clients.errors import CallFailed, DeadlineExceeded
from engine_service.core.pause_modes import PauseMode
from engine_service.errors import CheckpointError
from relay_service.core.instance import State
from seedrelay.v1 import engine_pb2

TENSORS = [Tensor("a", "U8", [5], PUSHED[:5]), Tensor("b", "F32", [2], PUSHED[5:])]


@pytest.fixture
def stand(service, tmp_path):
    """An engine that serves old weights."""
    stand = Stand(tmp_path, service)
    stand.folder()
    service.servicer._updates = stand.updates
    return stand


@pytest.fixture
def client(service):
    """Its client."""
    return service.client


def asked(version="v2", **changes) -> engine_pb2.WeightUpdate:
    """Returns an update from disk; `changes` are fields of it."""
    source = {"disk": {"folder": "new"}}
    return engine_pb2.WeightUpdate(**{"weight_version": version, "source": source} | changes)


def pushed(version="v2", **changes) -> engine_pb2.WeightUpdate:
    """Returns an update that is pushed."""
    return asked(version, source={"push": {}}, **changes)


async def begin(client, update=None, **fields) -> str:
    """Begins a session; returns its name."""
    update = update or pushed()
    request = engine_pb2.BeginWeightUpdateRequest(update=update, **fields)
    return (await client.begin_update(request)).session


async def whole(client, update=None, **fields) -> list[engine_pb2.UpdateWeightsResponse]:
    """Does a whole update; returns what came."""
    request = engine_pb2.UpdateWeightsRequest(update=update or asked(), **fields)
    return [message async for message in client.update(request)]


async def test_an_update_in_one_call(stand, client):
    """Its progress, its report, and what the status says before and after."""
    stand.steps.hold_at = "FinishStaging"
    calling = asyncio.create_task(whole(client, operator="trainer"))
    await stand.steps.reached.wait()
    during = (await client.status()).update
    assert (during.phase, len(during.session)) == ("staging", 32)
    assert during.note.startswith("reading ")
    stand.steps.release.set()
    messages = await calling
    report = messages[-1].report
    assert [m.HasField("report") for m in messages] == [False] * (len(messages) - 1) + [True]
    assert (report.weight_version, report.epoch, report.bytes_changed) == ("v2", 2, 201)
    assert (report.weights_digest, report.state) == (
        stand.instance.engine.weights.digest,
        engine_pb2.EngineStatus(state="INSTANCE_STATE_READY").state,
    )
    assert [(r.rank, r.bytes_changed, r.seconds_copied, r.extra_bytes_peak, r.bytes_read)
            for r in report.ranks] == [(0, 100, 0.5, 64, 7), (1, 101, 0.5, 64, 7)]  # fmt: skip
    assert [r.digest for r in report.ranks] == [m.digest for m in stand.instance.manifests]
    assert report.seconds_paused >= report.seconds_drained == 0.25
    assert report.notes == ["tied: the head is the embedding"]
    status = await client.status()
    assert (status.weight_version, status.epoch, status.HasField("update")) == ("v2", 2, False)
    assert stand.instance.pauser.asked[0].operator == "trainer"
    assert stand.instance.pauser.asked[0].mode is PauseMode.RETRACT


async def test_an_update_in_steps(stand, client):
    """Begin, renew, stage, commit: each answers for itself, and the commit as often as asked."""
    request = engine_pb2.BeginWeightUpdateRequest(update=asked(pause_mode="PAUSE_MODE_KEEP"))
    request.lease.FromSeconds(30)
    base = stand.instance.engine.weights.digest
    begun = await client.begin_update(request)
    assert (begun.base_digest, begun.lease.seconds) == (base, 30)
    await client.renew_update(begun.session)
    staged = [message async for message in client.stage(begun.session)][-1]
    assert (staged.progress.phase, staged.staged.bytes_changed) == ("staged", 201)
    assert (await client.status()).weights_digest == base
    report = await client.commit_update(begun.session)
    assert report == await client.commit_update(begun.session)
    assert (report.weights_digest, report.cache_kept) == (staged.staged.weights_digest, True)
    assert await client.abort_update(begun.session) is False


async def test_a_push(stand, client):
    """Tensors come as they were sent, whatever their size."""
    session = await begin(client)
    staged = await client.push(session, TENSORS)
    assert stand.ranks.pushed == PUSHED
    assert len(stand.ranks.headers[0].digest) == 16
    await client.commit_update(session)
    assert stand.ranks.arenas_hold == contents_of(PUSHED)
    assert staged.weights_digest == stand.instance.engine.weights.digest


async def test_a_tensor_larger_than_any_message(stand, client):
    """S10: it is cut; at the limit, one element less and one more."""
    for size in (PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES + 5, 0):
        session = await begin(client)
        await client.push(session, [Tensor("big", "U8", [size], bytes(size)), *TENSORS])
        assert stand.ranks.pushed == bytes(size) + PUSHED
        lengths = [len(data) for (n, _), data in sorted(stand.ranks.pieces.items()) if n == 0]
        assert len(lengths) == -(-size // PIECE_BYTES)
        await client.abort_update(session)
    assert PIECE_BYTES % ELEMENT_BYTES == 0


async def test_a_message_at_the_limit(stand, client):
    """S47: one of 4 MiB passes; a larger one is refused with the limit, and hurts nobody."""

    async def push(nbytes: int) -> None:
        session = await begin(client)
        header, piece = list(_messages(
            engine_pb2.PushHeader(session=session, tensors=[{
                "name": "big", "dtype": "U8", "shape": [5 << 20]}]),
            [Tensor("big", "U8", [1], b"x")]))  # fmt: skip
        piece.piece.data = b"x" * (nbytes - 16)
        piece.piece.data = b"x" * (nbytes - (piece.ByteSize() - (nbytes - 16)))
        assert piece.ByteSize() == nbytes
        await client._answer(client._stub.PushWeights(iter([header, piece])))

    with pytest.raises(CallFailed, match="not all has come: missing are big"):
        await push(4 << 20)
    with pytest.raises(CallFailed, match=str(4 << 20)) as refused:
        await push((4 << 20) + 1)
    assert refused.value.code == "RESOURCE_EXHAUSTED"
    await eventually(lambda: stand.updates.current is None)
    assert (await whole(client))[-1].report.epoch == 2


async def test_three_chunks_and_the_second_is_bad(stand, client):
    """S14: nothing can be committed then, no token says the new version, and a retry is clean."""
    session = await begin(client)
    header, *pieces = _messages(
        engine_pb2.PushHeader(session=session, tensors=[
            {"name": "a", "dtype": "U8", "shape": [5]}, {"name": "b", "dtype": "F32", "shape": [2]}
        ]), TENSORS)  # fmt: skip
    pieces[1].piece.offset = 2
    with pytest.raises(CallFailed, match="b: bytes 2 to 10 are no whole elements") as refused:
        await client._answer(client._stub.PushWeights(iter([header, *pieces])))
    assert (refused.value.code, refused.value.reason) == ("INVALID_ARGUMENT", "InvalidRequest")
    with pytest.raises(CallFailed, match="no whole elements") as ended:
        await client.commit_update(session)
    assert (ended.value.code, ended.value.reason) == ("FAILED_PRECONDITION", "UpdateEnded")
    chunks = await stand.service.answer(**tokens(1))
    assert {chunk.weight_version for chunk in chunks} == {"v1"}
    session = await begin(client)
    await client.push(session, TENSORS)
    await client.commit_update(session)
    chunks = await stand.service.answer(**tokens(1))
    assert {(chunk.weight_version, chunk.epoch) for chunk in chunks} == {("v2", 2)}


async def test_who_still_writes_is_told_why(stand, client):
    """A push that has failed is heard out for a moment: gRPC would tell its caller no reason."""
    session = await begin(client)
    header, piece, *_ = _messages(engine_pb2.PushHeader(session=session, tensors=[
        {"name": "b", "dtype": "F32", "shape": [2]}]), TENSORS[1:])  # fmt: skip
    call, reason = client._stub.PushWeights(), ""
    await call.write(header)
    piece.piece.offset = 2
    await call.write(piece)
    async with asyncio.timeout(5):
        while reason != "UpdateEnded":
            with pytest.raises(CallFailed) as refused:
                await client.commit_update(session)
            reason = refused.value.reason
    await call.write(piece)
    await call.done_writing()
    with pytest.raises(CallFailed, match="b: bytes 2 to 10 are no whole elements"):
        await client._answer(call)


async def test_a_push_whose_caller_is_killed(stand, client):
    """S15: its session ends with its call, and another begins at once."""
    session = await begin(client)
    header, *_ = _messages(engine_pb2.PushHeader(session=session, tensors=[
        {"name": "a", "dtype": "U8", "shape": [5]}]), TENSORS)  # fmt: skip

    async def silent():
        yield header
        await asyncio.Event().wait()

    call = client._stub.PushWeights(silent())
    await eventually(lambda: "StageHeaders" in stand.steps.log)
    with pytest.raises(CallFailed, match="changes the weights") as busy:
        await begin(client, operator="second")
    assert (busy.value.code, busy.value.reason) == ("UNAVAILABLE", "UpdateBusy")
    assert busy.value.details["holder"].endswith("for v2")
    assert float(busy.value.details["age_seconds"]) >= 0
    assert busy.value.retry_seconds
    call.cancel()
    await eventually(lambda: stand.updates.current is None)
    await begin(client)
    last = stand.instance.history.records[-1]
    assert (last.result, last.reason) == ("aborted", "its caller has left")


async def test_waiting_for_another(stand, client):
    """A call that waits says for whom; it goes on when that one has ended."""
    first = await begin(client, operator="first")
    request = engine_pb2.UpdateWeightsRequest(update=asked("v3"))
    request.wait.FromSeconds(60)
    messages = client.update(request)
    progress = (await anext(messages)).progress
    assert (progress.phase, progress.note) == ("waiting", "first, for v2")
    assert await client.abort_update(first) is True
    *_, last = [message async for message in messages]
    assert (last.report.weight_version, last.progress.phase) == ("v3", "done")


async def test_a_call_whose_time_is_over(stand, client):
    """While it stages, it is ended with all that it staged; in its commit it is not."""
    stand.steps.hold_at = "FinishStaging"
    request = engine_pb2.UpdateWeightsRequest(update=asked())
    with pytest.raises(DeadlineExceeded):
        async for _ in client.update(request, timeout=1):
            pass
    await eventually(lambda: stand.updates.current.result is not None)
    stand.steps.release.set()
    await eventually(lambda: stand.updates.current is None)
    assert stand.instance.engine.weights.epoch == 1
    stand.steps.hold_at = "ApplyUpdate"
    stand.steps.release.clear()
    stand.steps.reached.clear()
    with pytest.raises(DeadlineExceeded):
        async for _ in client.update(request, timeout=2):
            pass
    assert stand.steps.reached.is_set(), "the commit had not begun"
    stand.steps.release.set()
    await eventually(lambda: stand.instance.engine.weights.epoch == 2)


@pytest.mark.parametrize("folder", ["../outside", "/etc", "new/../../outside", "link", "a\0b", ""])
async def test_a_path_outside_the_root(stand, client, folder):
    """S44: nothing is read there, whatever it is called."""
    outside = stand.root.parent / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "model.safetensors").write_bytes(b"x")
    (stand.root / "link").symlink_to(outside)
    with pytest.raises(CallFailed) as refused:
        await whole(client, asked(source={"disk": {"folder": folder}}))
    assert (refused.value.code, stand.steps.log) == ("INVALID_ARGUMENT", [])


@pytest.mark.parametrize(
    ("update", "field"),
    [
        ({"weight_version": ""}, "weight_version"),
        ({"source": {}}, "source"),
        ({"pause_mode": 9}, "pause_mode"),
        ({"on_pause_deadline": "PAUSE_MODE_WAIT"}, "on_pause_deadline"),
        ({"staging": 7}, "staging"),
        ({"completeness": 7}, "completeness"),
        ({"probe": [{}]}, "probe.prompt_token_ids"),
        ({"files": {"../x": b""}}, "files"),
        ({"pause_deadline": {"seconds": -1}}, "pause_deadline"),
        ({"source": {"disk": {"folder": "new", "rate_limit_bytes_per_second": -1}}}, "source.disk"),
    ],
)
async def test_what_cannot_be_asked(stand, client, update, field):
    """It is refused by field, and nobody's session is begun."""
    with pytest.raises(CallFailed) as refused:
        await whole(client, asked(**update))
    assert (refused.value.code, refused.value.details["field"]) == ("INVALID_ARGUMENT", field)
    assert stand.updates.current is None


async def test_versions(stand, client):
    """All that served and all that failed, with who, from where and why."""
    await whole(client, operator="trainer")
    stand.ranks.bad = CheckpointError("layer.1 is torn")
    with pytest.raises(CallFailed, match=r"layer\.1 is torn") as failed:
        await whole(client, asked("v3"))
    assert failed.value.code == "INVALID_ARGUMENT"
    records = await client.versions()
    assert [(r.weight_version, r.result, r.epoch, r.source) for r in records] == [
        ("v1", "served", 1, "disk:start"),
        ("v2", "serves", 2, "disk:new"),
        ("v3", "failed", 0, "disk:new"),
    ]
    assert (records[1].operator, records[1].bytes_changed) == ("trainer", 201)
    assert records[1].pause_mode == engine_pb2.PAUSE_MODE_RETRACT
    assert "layer.1 is torn" in records[2].reason
    assert records[0].time.seconds <= records[2].time.seconds


async def test_a_label(stand, client):
    """It is called otherwise from the next token on; digest, epoch and computed KV stay."""
    prompt = tuple(range(20))
    await stand.service.answer(**tokens(*prompt))
    digest = stand.instance.engine.weights.digest
    stand.ranks.gate.clear()
    stand.ranks.stepping.clear()
    reading = asyncio.create_task(stand.service.answer(**tokens(1, max_tokens=4)))
    await stand.ranks.stepping.wait()
    with pytest.raises(CallFailed, match="other weights serve"):
        await client.set_version("v9", "00" * 16)
    assert await client.set_version("v1.1", digest.upper()) == "v1"
    stand.ranks.gate.set()
    spans = (await reading)[-1].version_spans
    assert [(s.weight_version, s.epoch) for s in spans] == [("v1", 1), ("v1.1", 1)]
    *_, last = await stand.service.answer(**tokens(*prompt))
    assert last.usage.cached_tokens == 16
    status = await client.status()
    assert (status.weight_version, status.weights_digest, status.epoch) == ("v1.1", digest, 1)
    assert [r.result for r in await client.versions()] == ["served", "serves"]
    assert stand.instance.link.told == 1
    with pytest.raises(CallFailed, match="a version of 1 to"):
        await client.set_version("")


async def test_an_answer_across_an_update(stand, client):
    """S26: every chunk carries the version that made it, and the last one both spans."""
    stand.ranks.gate.clear()
    reading = asyncio.create_task(stand.service.answer(**tokens(1, max_tokens=40)))
    await stand.ranks.stepping.wait()
    updating = asyncio.create_task(whole(client))
    await eventually(lambda: "pause" in stand.steps.log)
    stand.ranks.gate.set()
    await updating
    chunks = await reading
    spans = [(s.weight_version, s.epoch, s.start, s.end) for s in chunks[-1].version_spans]
    assert spans[0][:3] == ("v1", 1, 0)
    assert [span[0] for span in spans] == ["v1", "v2"]
    assert spans[-1][3] == 40
    made = [(c.weight_version, c.epoch) for c in chunks for _ in c.token_ids]
    assert made == [span[:2] for span in spans for _ in range(span[2], span[3])]


async def test_a_tokenizer_that_switches(stand, client):
    """Answers in flight go on with theirs; the next one has the new one."""
    letters = json.loads(stand.instance.files["tokenizer.json"])
    vocab = letters["model"]["vocab"]
    vocab["B"], vocab["C"] = vocab["C"], vocab["B"]
    stand.ranks.gate.clear()
    reading = asyncio.create_task(stand.service.answer(**tokens(65)))
    await stand.ranks.stepping.wait()
    files = {"tokenizer.json": json.dumps(letters).encode()}
    updating = asyncio.create_task(whole(client, asked(files=files)))
    await eventually(lambda: "pause" in stand.steps.log)
    stand.ranks.gate.set()
    await updating
    assert "".join(chunk.text for chunk in await reading) == "BCD"
    assert "".join(chunk.text for chunk in await stand.service.answer(**tokens(65))) == "CBD"


async def test_what_a_gateway_is_told(stand, client):
    """Its protocol has no field: version, epoch and spans come as trailing metadata."""
    stub = vllm_engine_pb2_grpc.VllmEngineStub(client.channel)
    stand.instance.engine.weights = stand.instance.engine.weights.__class__("vé", "ab", 3)
    request = vllm_engine_pb2.GenerateRequest(
        request_id="r", tokenized={"input_ids": [1]}, sampling_params={"max_tokens": 3, "n": 2}
    )
    call = stub.Generate(request)
    assert [response async for response in call]
    trailing = dict(await call.trailing_metadata())
    assert trailing["seedrelay-weight-version"] == "v\\u00e9"
    assert trailing["seedrelay-weights-epoch"] == "3"
    spans = json.loads(trailing["seedrelay-version-spans"])
    assert sorted(spans, key=lambda one: one["index"]) == [
        {"index": n, "weight_version": "vé", "epoch": 3, "start": 0, "end": 3} for n in range(2)
    ]
    refused = stub.Generate(vllm_engine_pb2.GenerateRequest(request_id="s"))
    with pytest.raises(grpc.aio.AioRpcError):
        await anext(aiter(refused))


async def test_an_instance_that_fails_in_the_copy(stand, client):
    """Nobody is answered any more, and the error says that something has changed."""
    stand.steps.fail_at, stand.steps.error = 5, CheckpointError("block 3 differs")
    with pytest.raises(CallFailed, match="half-way: block 3 differs") as failed:
        await whole(client)
    assert stand.steps.log[5] == "ApplyUpdate"
    assert failed.value.details["changed"] == "yes"
    assert stand.instance.lifecycle.state is State.FAILED
    with pytest.raises(CallFailed, match="FAILED: an update to v2 failed half-way"):
        await stand.service.answer(**tokens(1))
