"""Loading fills an arena exactly, digests it once, and refuses what does not fit."""

import json
import os
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_llama import serving_rank, start_message, write_checkpoint

from engine_service.device.loading import load
from engine_service.device.models.llama_format import checkpoint_slices, computed_tensors
from engine_service.device.rank import Rank
from engine_service.errors import CheckpointError, WrongState
from relay_service.core.digests import block_digest
from relay_service.core.manifest import BLOCK_BYTES

FILE = "model.safetensors"
NORM = "model.norm.weight"
EMBED = "model.embed_tokens.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"


def _load(folder: Path) -> Rank:
    rank = Rank(start_message(folder))
    rank.load(folder, lambda _done, _total: None)
    return rank


def _header(path: Path) -> tuple[dict, bytes]:
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def _write(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def _resave(path: Path, change) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def _overlap(path):
    header, data = _header(path)
    header[NORM]["data_offsets"] = header["model.layers.0.input_layernorm.weight"]["data_offsets"]
    _write(path, json.dumps(header).encode(), data)


def _duplicate(path):
    header, data = _header(path)
    twice = json.dumps(header)[:-1] + f', "{NORM}": {json.dumps(header[NORM])}}}'
    _write(path, twice.encode(), data)


def _integer_norm(tensors):
    tensors[NORM] = tensors[NORM].to(torch.int32)


MALFORMED = {
    "empty": (lambda path: path.write_bytes(b""), FILE),
    "seven bytes": (lambda path: path.write_bytes(b"1234567"), FILE),
    "endless header": (lambda path: path.write_bytes(struct.pack("<Q", 1 << 40) + b"{}"), FILE),
    "header over 100 MB": (
        lambda path: _write(path, b"{" + b" " * 100_000_001 + b"}", b""), FILE
    ),
    "header is no JSON": (lambda path: _write(path, b"not json", b""), FILE),
    "header is no object": (lambda path: _write(path, b"[1, 2]", b""), FILE),
    "one byte short": (lambda path: os.truncate(path, path.stat().st_size - 1), FILE),
    "trailing bytes": (lambda path: path.write_bytes(path.read_bytes() + bytes(8)), FILE),
    "overlapping offsets": (_overlap, FILE),
    "duplicate name": (_duplicate, NORM),
    "missing file": (lambda path: path.unlink(), FILE),
    "missing tensor": (lambda path: _resave(path, lambda t: t.pop(QUERY)), QUERY),
    "unknown tensor": (lambda path: _resave(path, lambda t: t.update(odd=t[NORM] + 1)), "odd"),
    "prefixed names": (
        lambda path: _resave(path, lambda t: t.update(x=t.pop(NORM))), f"missing.*{NORM}"
    ),
    "wrong shape": (
        lambda path: _resave(path, lambda t: t.update({NORM: torch.ones(65)})), r"\[65\].*\[64\]"
    ),
    "empty placeholder": (
        lambda path: _resave(path, lambda t: t.update({NORM: torch.ones(0)})), r"\[0\].*\[64\]"
    ),
    "scalar": (
        lambda path: _resave(path, lambda t: t.update({NORM: torch.tensor(1.0)})), r"\[\].*\[64\]"
    ),
    "one value": (
        lambda path: _resave(path, lambda t: t.update({NORM: torch.ones(1)})), r"\[1\].*\[64\]"
    ),
    "hollow": (
        lambda path: _resave(path, lambda t: t.update({NORM: torch.ones(2, 0)})),
        r"\[2, 0\].*\[64\]",
    ),
    "integers": (lambda path: _resave(path, _integer_norm), "I32"),
    "another head": (
        lambda path: _resave(path, lambda t: t.update({"lm_head.weight": t[EMBED] + 1})),
        "lm_head.*tie_word_embeddings",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_file_is_refused_by_name(tmp_path, case):
    """Nothing lands, and the error names the file or the tensor."""
    break_it, named = MALFORMED[case]
    folder = write_checkpoint(tmp_path)
    break_it(folder / FILE)
    rank = Rank(start_message(folder))
    with pytest.raises(CheckpointError, match=named):
        rank.load(folder, lambda _done, _total: None)
    assert not any(tensor.any() for tensor in rank.arena.tensors.values())
    assert not rank.arena.sealed


def test_a_file_that_shrinks_while_it_is_read_is_refused(tmp_path):
    """A short read names the tensor that lacks bytes."""
    folder = write_checkpoint(tmp_path)
    rank = Rank(start_message(folder))

    def shrink(_done, _total):
        os.truncate(folder / FILE, 8)

    with pytest.raises(CheckpointError, match="ends within"):
        rank.load(folder, shrink)


def test_a_head_that_equals_its_tied_embedding_is_accepted(tmp_path):
    """Some exports store the tied head a second time."""
    folder = write_checkpoint(tmp_path)
    plain = _load(folder).arena.digested().digest
    _resave(folder / FILE, lambda t: t.update({"lm_head.weight": t[EMBED].clone()}))
    assert _load(folder).arena.digested().digest == plain


def test_stored_rotary_frequencies_are_ignored(tmp_path):
    """Old exports carry them; the tables come from the configuration."""
    folder = write_checkpoint(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    _resave(folder / FILE, lambda t: t.update({name: torch.ones(8)}))
    assert _load(folder).arena.sealed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("served", ["float32", "bfloat16"])
def test_the_arena_holds_the_checkpoint_converted(tmp_path, dtype, served):
    """Each fused tensor is its parts, in the type that was asked for."""
    folder = write_checkpoint(tmp_path, dtype=dtype)
    rank = serving_rank(folder, served)
    stored = load_file(folder / FILE)
    for unit in rank.arena.manifest.units:
        for entry in unit.tensors:
            if entry.logical:
                parts = [stored[name] for name in entry.logical.split("+")]
                expected = torch.cat(parts).to(getattr(torch, served))
                assert torch.equal(rank.arena.tensors[entry.name], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_byte_is_digested_once_while_loading(tmp_path, dtype):
    """Digests made on the way equal a later pass; each byte of each unit was seen once."""
    changes = {"hidden_size": 320, "intermediate_size": 1001, "max_position_embeddings": 20000}
    folder = write_checkpoint(tmp_path, dtype=dtype, **changes)
    rank = Rank(start_message(folder))
    seen = []

    def digest(block):
        seen.append((torch.frombuffer(block, dtype=torch.uint8).data_ptr(), len(block)))
        return block_digest(block)

    slices, computed = checkpoint_slices(rank.config), computed_tensors(rank.config)
    done = []
    manifest, report = load(
        rank.arena,
        folder,
        slices,
        computed,
        digest=digest,
        progress=lambda d, t: done.append((d, t)),
    )
    units = rank.arena.manifest.units
    assert max(unit.nbytes for unit in units) > 2 * BLOCK_BYTES
    expected = [rank.arena.manifest.block(i) for i in range(rank.arena.manifest.block_count)]
    base = rank.arena.address
    assert sorted(seen) == [(base + block.offset, block.nbytes) for block in expected]
    assert manifest == rank.arena.digested()
    stored = sum(tensor.nbytes for tensor in load_file(folder / FILE).values())
    assert (report.bytes_read, done[-1]) == (stored, (stored, stored))


def test_nothing_of_the_checkpoint_stays_mapped_or_open(tmp_path):
    """Overwriting the files of a serving instance cannot change it."""
    folder = write_checkpoint(tmp_path)
    rank = _load(folder)
    assert str(folder) not in Path("/proc/self/maps").read_text()
    opened = [link.resolve() for link in Path("/proc/self/fd").iterdir()]
    assert not any(folder in path.parents for path in opened)
    before = rank.arena.digested().digest
    write_checkpoint(folder, seed=2)
    assert rank.arena.digested().digest == before


def test_a_path_that_was_overwritten_loads_the_new_weights(tmp_path):
    """Nothing is remembered by path."""
    one = _load(write_checkpoint(tmp_path, seed=1)).arena.digested().digest
    two = _load(write_checkpoint(tmp_path, seed=2)).arena.digested().digest
    assert one != two


def test_serving_weights_cannot_be_loaded_over(tied):
    """A sealed arena refuses another load."""
    with pytest.raises(WrongState, match="sealed"):
        serving_rank(tied).load(tied, lambda _done, _total: None)
