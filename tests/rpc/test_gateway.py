"""The gateway's protocol over real sockets, with a runner that adds one instead of a model."""

import asyncio
import hashlib
import io
import json
import zipfile

import grpc
import pytest
from engines import CONTEXT, EOS, VOCAB
from fakes import eventually
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from engine_service.core.request import GenerationRequest
from engine_service.core.scheduler import Limits
from engine_service.errors import NonFiniteLogits
from engine_service.rpc import convert_gateway, convert_gateway_info
from engine_service.rpc import server as rpc
from relay_service.core.instance import State

GATEWAY = "vllm.grpc.engine.VllmEngine"
Request = vllm_engine_pb2.GenerateRequest


@pytest.fixture
def stub(service):
    """What a gateway calls the engine with."""
    return vllm_engine_pb2_grpc.VllmEngineStub(service.client.channel)


def asks(*ids: int, stream: bool = False, name: str = "", **sampling) -> Request:
    """Returns a request for a tokenized prompt."""
    params = {"max_tokens": 3, "temperature": 0} | sampling
    return Request(
        request_id=name, stream=stream, tokenized={"input_ids": ids}, sampling_params=params
    )


async def answers(stub, request: Request) -> list:
    """Returns the messages of an answer, each without its wrapper."""
    return [
        getattr(one, one.WhichOneof("response")) async for one in stub.Generate(request, timeout=20)
    ]


async def refusal(stub, request: Request) -> tuple[str, str]:
    """Returns the status and the message that a request is refused with."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await answers(stub, request)
    return refused.value.code().name, refused.value.details()


def converted(service, **request) -> tuple[GenerationRequest, int]:
    """Returns what the engine understands of a request."""
    return convert_gateway.request_from_proto(Request(**request), service.instance.codec)


# Answers


async def test_a_whole_answer(stub):
    """Without streaming, one message has all tokens, counts and the reason."""
    (whole,) = await answers(stub, asks(97))
    assert list(whole.output_ids) == [98, 99, 100]
    assert (whole.finish_reason, whole.index) == ("length", 0)
    assert (whole.prompt_tokens, whole.completion_tokens, whole.cached_tokens) == (1, 3, 0)
    assert whole.WhichOneof("matched_stop") is None


async def test_a_streamed_answer(stub):
    """Streaming, each token is a chunk of its own; what completes the answer has all of them."""
    *chunks, whole = await answers(stub, asks(97, stream=True))
    assert [list(chunk.token_ids) for chunk in chunks] == [[98], [99], [100]]
    assert {(chunk.prompt_tokens, chunk.completion_tokens) for chunk in chunks} == {(1, 1)}
    assert (list(whole.output_ids), whole.finish_reason) == ([98, 99, 100], "length")
    assert (whole.prompt_tokens, whole.completion_tokens) == (1, 3)


async def test_text_is_tokenized(stub):
    """A prompt may be text."""
    (whole,) = await answers(stub, Request(text="a", sampling_params={"max_tokens": 1}))
    assert whole.prompt_tokens == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_several_answers(stub, stream):
    """Each of `n` answers has its index, its own tokens and its own end."""
    messages = await answers(stub, asks(97, stream=stream, n=2, max_tokens=2))
    ends = [one for one in messages if isinstance(one, vllm_engine_pb2.GenerateComplete)]
    assert sorted(end.index for end in ends) == [0, 1]
    assert all(list(end.output_ids) == [98, 99] for end in ends)
    chunks = [one for one in messages if one not in ends]
    assert sorted(one.index for one in chunks) == ([0, 0, 1, 1] if stream else [])


async def test_cached_tokens(stub):
    """Tokens of the prompt whose KV was there are counted, in chunks and at the end."""
    prompt = list(range(1, 13))
    await answers(stub, asks(*prompt, max_tokens=1))
    chunk, whole = await answers(stub, asks(*prompt, stream=True, max_tokens=1))
    assert (chunk.cached_tokens, whole.cached_tokens) == (8, 8)


@pytest.mark.parametrize(
    ("sampling", "ids", "finish", "matched"),
    [
        ({"max_tokens": 50}, [246, 247, 248, 249, EOS], "stop", None),
        ({"max_tokens": 7, "ignore_eos": True}, list(range(246, 253)), "length", None),
        ({"stop_token_ids": [247]}, [246, 247], "stop", ("matched_token_id", 247)),
    ],
)
async def test_stop_tokens(stub, sampling, ids, finish, matched):
    """A stop token is named if the caller asked for it, an end-of-sequence token is not."""
    (whole,) = await answers(stub, asks(245, **sampling))
    assert (list(whole.output_ids), whole.finish_reason) == (ids, finish)
    kind = whole.WhichOneof("matched_stop")
    assert (kind and (kind, getattr(whole, kind))) == matched


async def test_stop_texts(stub):
    """A stop text ends an answer and is named."""
    (whole,) = await answers(stub, asks(97, stop=["cd", "zz"], max_tokens=9))
    assert (whole.finish_reason, whole.matched_stop_str) == ("stop", "cd")
    assert list(whole.output_ids) == [98, 99, 100]


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(stub, stream):
    """Log-probabilities come with their tokens; the prompt's first token has none."""
    request = asks(7, 8, 9, stream=stream, max_tokens=2, logprobs=2, prompt_logprobs=1)
    messages = await answers(stub, request)
    carriers = messages[:-1] if stream else messages
    output = [one.output_logprobs for one in carriers]
    assert [i for one in output for i in one.token_ids] == [10, 11]
    assert [p for one in output for p in one.token_logprobs] == [-0.5, -0.5]
    tops = [(list(t.token_ids), list(t.values)) for one in output for t in one.top_logprobs]
    assert tops == [([10, 11], [-0.5, -1.5]), ([11, 12], [-0.5, -1.5])]
    prompt = carriers[0].input_logprobs
    assert list(prompt.token_ids) == [7, 8, 9]
    assert [p.value if p.HasField("value") else None for p in prompt.token_logprobs] == [
        None, -1.0, -1.0,
    ]  # fmt: skip
    assert [list(top.token_ids) for top in prompt.top_logprobs] == [[], [8], [9]]
    assert not any(one.HasField("input_logprobs") for one in messages[1:])


async def test_no_logprobs_unless_asked(stub):
    """Unset is not the same as 0: 0 asks for the token's own."""
    (without,) = await answers(stub, asks(1))
    assert not without.HasField("output_logprobs")
    (own,) = await answers(stub, asks(1, logprobs=0))
    assert len(own.output_logprobs.token_logprobs) == 3
    assert not any(top.token_ids for top in own.output_logprobs.top_logprobs)


@pytest.mark.parametrize(
    ("prompt", "constraint", "ids"),
    [
        ("a", {"regex": "bcd"}, [98, 99, 100]),
        ("a", {"choice": {"choices": ["bcd", "xyz"]}}, [98, 99, 100]),
        ("a", {"grammar": 'start: "bcd"'}, [98, 99, 100]),
        ("a", {"grammar": 'root ::= "b" rest\nrest ::= "cd"'}, [98, 99, 100]),
        ("!", {"json_schema": '{"type": "string"}', "max_tokens": 2}, [34, 35]),
        ("z", {"json_object": True, "max_tokens": 1}, [123]),
        ("z", {"json_object": False, "max_tokens": 2}, [123, 124]),
    ],
)
async def test_structure(service, stub, prompt, constraint, ids):
    """Each kind of structure reaches the engine, which ends where nothing may follow."""
    params = {"temperature": 0, "max_tokens": 9, **constraint}
    (whole,) = await answers(stub, Request(text=prompt, sampling_params=params))
    assert list(whole.output_ids) == ids
    structured = constraint.get("json_object", True)
    assert bool(service.ranks.steps[0][0].allowed) is structured


# What unset means


async def test_unset_settings(service):
    """Unset, a temperature is 1, an answer may fill the context, and a seed is fresh."""
    wanted, count = converted(service, text="a")
    sampling = wanted.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (1, 1, 0, 0)
    assert (sampling.repetition_penalty, sampling.logprobs) == (1, None)
    assert (wanted.max_tokens >= CONTEXT, wanted.min_tokens, count) == (True, 0, 1)
    assert wanted.stop_ids == {EOS}
    assert sampling.seed != converted(service, text="a")[0].sampling.seed


async def test_an_answer_without_a_limit_fills_the_context(stub):
    """Without a number of tokens an answer goes on to the end of the context."""
    request = Request(tokenized={"input_ids": [1]}, sampling_params={"temperature": 0})
    (whole,) = await answers(stub, request)
    assert (whole.completion_tokens, whole.finish_reason) == (CONTEXT - 1, "length")


async def test_set_settings(service):
    """What is set reaches the engine as it is, a temperature and a seed of 0 too."""
    params = {
        "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.25, "frequency_penalty": 1,
        "presence_penalty": -1, "repetition_penalty": 2, "max_tokens": 5, "min_tokens": 2,
        "stop": ["x"], "stop_token_ids": [4], "ignore_eos": True, "n": 3, "logprobs": 1,
        "prompt_logprobs": 2, "seed": 0, "include_stop_str_in_output": True,
        "logit_bias": {7: 1.5},
    }  # fmt: skip
    wanted, count = converted(service, request_id="r", text="a", sampling_params=params)
    sampling = wanted.sampling
    for name in (
        "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
        "repetition_penalty", "logprobs", "prompt_logprobs", "seed", "logit_bias",
    ):  # fmt: skip
        assert getattr(sampling, name) == params[name], name
    assert (wanted.max_tokens, wanted.min_tokens, count) == (5, 2, 3)
    assert (wanted.stop_texts, wanted.stop_ids, wanted.shows_stop) == (("x",), {4}, True)
    assert (wanted.request, wanted.constraint) == ("r", None)
    negative, _ = converted(service, text="a", sampling_params={"seed": -1})
    assert negative.sampling.seed == (1 << 64) - 1


async def test_a_truncated_prompt(service):
    """A prompt can be cut to its last tokens."""
    params = {"truncate_prompt_tokens": 2}
    wanted, _ = converted(service, tokenized={"input_ids": [1, 2, 3]}, sampling_params=params)
    assert wanted.prompt == (2, 3)


# Refusals


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (Request(), "tokenized or text"),
        (asks(), "the prompt is empty"),
        (asks(VOCAB), "tokenized.input_ids"),
        (asks((1 << 32) - 1), "tokenized.input_ids"),
        (asks(*[1] * CONTEXT), "prompt"),
        (asks(1, max_tokens=0), "sampling_params.max_tokens"),
        (asks(1, max_tokens=(1 << 32) - 1), "sampling_params.max_tokens"),
        (asks(1, min_tokens=4), "sampling_params.min_tokens"),
        (asks(1, temperature=-1), "sampling_params.temperature"),
        (asks(1, temperature=float("nan")), "sampling_params.temperature"),
        (asks(1, top_k=(1 << 32) - 1), "sampling_params.top_k"),
        (asks(1, top_p=1.5), "sampling_params.top_p"),
        (asks(1, logprobs=-1), "sampling_params.logprobs"),
        (asks(1, prompt_logprobs=21), "sampling_params.prompt_logprobs"),
        (asks(1, n=129), "sampling_params.n"),
        (asks(1, stop=[""]), "stop text is empty"),
        (asks(1, logit_bias={VOCAB: 1}), "sampling_params.logit_bias"),
        (asks(1, logit_bias={1: 101}), "sampling_params.logit_bias"),
        (asks(1, truncate_prompt_tokens=-1), "sampling_params.truncate_prompt_tokens"),
        (asks(1, json_schema="{"), "structure"),
        (asks(1, regex="("), "structure"),
        (asks(1, grammar="nonsense ("), "structure"),
        (asks(1, choice={}), "structure"),
        (asks(1, structural_tag="{}"), "structural_tag is not supported"),
        (Request(text="a", mm_inputs={}), "mm_inputs is not supported"),
        (Request(text="a", extra_mm_inputs=[{}]), "extra_mm_inputs is not supported"),
        (Request(text="a", media_refs={}), "media_refs is not supported"),
        (Request(text="a", kv_transfer_params={}), "kv_transfer_params is not supported"),
        (Request(text="a", kv_transfer_params_json="{}"), "kv_transfer_params_json is not"),
        (Request(text="a", data_parallel_rank=1), "data_parallel_rank is not supported"),
    ],
)
async def test_bad_input(service, stub, request_, field):
    """What cannot be served is refused by its name, and the next request is served."""
    code, message = await refusal(stub, request_)
    assert (code, field in message) == ("INVALID_ARGUMENT", True), message
    assert (service.scheduler.pool.used, service.scheduler.running) == (0, [])
    assert len(await answers(stub, asks(1))) == 1


async def test_the_only_data_parallel_rank(stub):
    """A request may be pinned to the rank that there is."""
    request = asks(1)
    request.data_parallel_rank = 0
    assert len(await answers(stub, request)) == 1


@pytest.mark.parametrize("state", [State.DUMMY, State.LANDING, State.FAILED, State.DRAINING])
async def test_not_ready(service, stub, state):
    """An engine that isn't ready says so to a health check, and generates nothing."""
    healthy = await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
    assert (healthy.healthy, healthy.message) == (True, "READY")
    service.enter(state, "because")
    code, message = await refusal(stub, asks(1))
    assert (code, message) == ("UNAVAILABLE", f"one is {state}: because")
    ill = await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())
    assert (ill.healthy, ill.message) == (False, f"{state}: because")


async def test_a_model_that_is_not_known_yet(service, stub):
    """Without a model there is nothing to describe, and no tokenizer to send."""
    service.instance.codec = None
    for call in (
        stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest()),
        stub.GetTokenizer(common_pb2.GetTokenizerRequest()).read(),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_name_that_is_taken(service, stub):
    """Two requests that are served at once cannot have the same name."""
    service.ranks.gate.clear()
    first = asyncio.create_task(answers(stub, asks(1, name="r")))
    await service.ranks.stepping.wait()
    assert (await refusal(stub, asks(1, name="r")))[0] == "ALREADY_EXISTS"
    service.ranks.gate.set()
    assert (await first)[0].finish_reason == "length"


async def test_a_step_that_fails(service, stub):
    """An answer that an error ends says so before the status does."""
    service.ranks.error = NonFiniteLogits("the weights compute NaN")
    call = stub.Generate(asks(1))
    assert (await call.read()).complete.finish_reason == "error"
    with pytest.raises(grpc.aio.AioRpcError, match="compute NaN") as failed:
        await call.read()
    assert failed.value.code() is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize("method", ["Embed", "StartProfile", "StopProfile", "SubscribeKvEvents"])
async def test_what_is_not_offered(stub, caplog, method):
    """Gateways try what not every engine has: the answer is short, and the log stays quiet."""
    kind = {
        "Embed": vllm_engine_pb2.EmbedRequest,
        "SubscribeKvEvents": common_pb2.SubscribeKvEventsRequest,
    }.get(method, getattr(common_pb2, f"{method}Request", None))
    call = getattr(stub, method)(kind())
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await (call.read() if method == "SubscribeKvEvents" else call)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert refused.value.details().startswith("this engine")
    assert caplog.records == []


async def test_foreign_services(service, caplog):
    """A gateway that looks for other kinds of engines finds none, and the log stays quiet."""
    call = service.client.channel.unary_unary("/sglang.grpc.scheduler.SglangScheduler/HealthCheck")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call(b"")
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert caplog.records == []


# Leaving


async def test_abort(service, stub):
    """An aborted answer ends with what it has, and frees its KV."""
    gate = service.ranks.gate
    gate.clear()
    call = stub.Generate(asks(1, name="r", stream=True, max_tokens=60))
    await service.ranks.stepping.wait()
    gate.set()
    gate.clear()  # one step, and no other
    made = list((await call.read()).chunk.token_ids)
    await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["r", "nobody"]))
    assert (service.scheduler.pool.used, service.scheduler.running) == (0, [])
    last = (await call.read()).complete
    assert (last.finish_reason, list(last.output_ids), made) == ("abort", [2], [2])
    assert await call.read() is grpc.aio.EOF
    gate.set()


async def test_aborting_all_answers(service, stub):
    """Aborting a request ends each of its answers."""
    service.ranks.gate.clear()
    reading = asyncio.create_task(answers(stub, asks(1, name="r", n=2)))
    await service.ranks.stepping.wait()
    await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["r"]))
    assert [end.finish_reason for end in await reading] == ["abort", "abort"]
    service.ranks.gate.set()


@pytest.fixture
async def preparing(service, monkeypatch):
    """Tokenizing text takes until a test lets it go on; two events: it began, it may go on."""
    loop, began, goes_on = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    encode = service.instance.codec.encode

    def slow_encode(text: str) -> tuple[int, ...]:
        loop.call_soon_threadsafe(began.set)
        asyncio.run_coroutine_threadsafe(goes_on.wait(), loop).result(20)
        return encode(text)

    monkeypatch.setattr(service.instance.codec, "encode", slow_encode)
    return began, goes_on


async def test_aborting_a_request_that_is_prepared(service, stub, preparing):
    """A request that is aborted while its text is tokenized never runs."""
    began, goes_on = preparing
    reading = asyncio.create_task(answers(stub, Request(request_id="r", text="a")))
    await began.wait()
    await stub.Abort(vllm_engine_pb2.AbortRequest(request_ids=["r"]))
    goes_on.set()
    (whole,) = await reading
    assert (whole.finish_reason, list(whole.output_ids)) == ("abort", [])
    assert service.ranks.steps == []
    (again,) = await answers(stub, asks(1, name="r"))
    assert again.finish_reason == "length"


async def test_an_engine_that_drains_while_a_request_is_prepared(service, stub, preparing):
    """A request that is still prepared when the engine stops serving never runs."""
    began, goes_on = preparing
    reading = asyncio.create_task(refusal(stub, Request(text="a")))
    await began.wait()
    service.instance.lifecycle.to(State.DRAINING)
    goes_on.set()
    assert (await reading)[0] == "UNAVAILABLE"
    assert service.ranks.steps == []


async def test_leaving_frees_the_kv(service, stub):
    """A gateway that cancels its call frees KV and slot."""
    call = stub.Generate(asks(1, stream=True, max_tokens=60, ignore_eos=True))
    await call.read()
    service.ranks.gate.clear()
    call.cancel()
    await eventually(lambda: not service.scheduler.running)
    assert service.scheduler.pool.used == 0
    service.ranks.gate.set()


# What it says of itself


async def test_the_model(service, stub):
    """The model is described by its files, its defaults included."""
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB,
        "eos_token_id": EOS, "bos_token_id": 5, "pad_token_id": None,
    }  # fmt: skip
    service.instance.codec.config = config
    generation = {"temperature": 0.6, "top_p": 0.9, "do_sample": True, "top_k": None}
    service.instance.files["generation_config.json"] = json.dumps(generation).encode()
    info = await stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
    assert (info.served_model_name, info.model_type) == ("tiny", "llama")
    assert (list(info.architectures), info.is_generation) == (["LlamaForCausalLM"], True)
    assert (info.max_context_length, info.max_req_input_len) == (CONTEXT, CONTEXT - 1)
    assert (info.vocab_size, list(info.eos_token_ids)) == (VOCAB, [EOS])
    assert (info.bos_token_id, info.pad_token_id) == (5, 0)
    assert json.loads(info.default_sampling_params_json) == {"temperature": 0.6, "top_p": 0.9}


async def test_the_load(service, stub):
    """Load and server information count what runs and what waits."""
    service.scheduler.limits = Limits(CONTEXT, 1, 2, 4)
    service.ranks.gate.clear()
    reading = [asyncio.create_task(answers(stub, asks(1, 2, 3, 4, 5)))]
    await service.ranks.stepping.wait()
    reading.append(asyncio.create_task(answers(stub, asks(1, 2, 3))))
    await eventually(lambda: service.scheduler.waiting)
    loads = await stub.GetLoads(vllm_engine_pb2.GetLoadsRequest())
    (load,) = loads.loads
    assert (loads.dp_rank_count, bool(loads.timestamp), bool(loads.version)) == (1, True, True)
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (1, 1, 2)
    assert (load.num_used_tokens, load.max_total_num_tokens, load.token_usage) == (8, 128, 8 / 128)
    assert (load.max_running_requests, load.num_waiting_uncached_tokens) == (1, 3)
    info = await stub.GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
    assert (info.active_requests, info.is_paused, info.max_num_seqs) == (2, False, 1)
    assert (info.server_type, info.data_parallel_size, info.block_size) == ("seedrelay", 1, 4)
    service.ranks.gate.set()
    await asyncio.gather(*reading)


async def test_flushing_the_cache(service, stub):
    """After a flush no prompt is found in the cache, and running answers go on."""
    prompt = list(range(1, 13))
    await answers(stub, asks(*prompt))
    service.ranks.gate.clear()
    service.ranks.stepping.clear()
    running = asyncio.create_task(answers(stub, asks(*prompt)))
    await service.ranks.stepping.wait()
    flushed = await stub.FlushCache(common_pb2.FlushCacheRequest())
    assert (flushed.success, flushed.message) == (True, "blocks freed: 1")
    assert service.scheduler.pool.cached == 0
    service.ranks.gate.set()
    assert (await running)[0].cached_tokens == 8
    service.scheduler.pool.forget()
    assert (await answers(stub, asks(*prompt)))[0].cached_tokens == 0


async def test_the_tokenizer(service, stub):
    """The small files come as a zip in chunks, whose last one carries the digest of all."""
    service.instance.files["special_tokens_map.json"] = b"x" * 10
    service.instance.files["tokenizer_config.json"] = bytes(range(256))
    sent = [one async for one in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in sent)
    assert [bool(chunk.sha256) for chunk in sent] == [False] * (len(sent) - 1) + [True]
    assert sent[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    assert files == service.instance.files


@pytest.mark.parametrize("size", [1, 64 << 10, (64 << 10) + 1, 3 * (64 << 10)])
def test_chunks(size):
    """Chunks have 64 KiB at most, and the digest stands on the last one alone."""
    data = bytes(size)
    chunks = list(convert_gateway_info.chunks_to_proto(data))
    assert b"".join(chunk.data for chunk in chunks) == data
    assert len(chunks) == -(-size // (64 << 10))
    assert [bool(chunk.sha256) for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


def test_flushing_needs_control():
    """Whoever may only generate does not empty the cache of everybody else."""
    scopes = {method.rpartition("/")[2]: needed for method, needed in rpc.SCOPES.items()
              if method.startswith(f"/{GATEWAY}/")}  # fmt: skip
    assert scopes.pop("FlushCache") == {"control"}
    assert set(scopes.values()) == {frozenset({"generate"})}


async def test_health_by_name(service):
    """The standard health service knows this service too."""
    stub = health_pb2_grpc.HealthStub(service.client.channel)

    async def status() -> int:
        return (await stub.Check(health_pb2.HealthCheckRequest(service=GATEWAY))).status

    async def is_serving() -> bool:
        return await status() == health_pb2.HealthCheckResponse.SERVING

    await eventually(is_serving)
    service.instance.lifecycle.to(State.DRAINING)

    async def is_over() -> bool:
        return await status() == health_pb2.HealthCheckResponse.NOT_SERVING

    await eventually(is_over)
