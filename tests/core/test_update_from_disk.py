"""Folders that are read: below the root, the files that were meant, and the files that travel."""

import asyncio
import base64
import hashlib
import json
import os
import threading

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from engines import EOS, VOCAB
from fakes import byte_level_tokenizer, eventually
from updates import Stand, contents_of, wanted

from engine_service.core.hashing import Hashing
from engine_service.core.model_root import SIGNATURE, SUMS, ModelRoot
from engine_service.core.update_messages import StageDisk
from engine_service.core.update_request import DiskSource
from engine_service.core.update_sessions import Caller, UpdateSessions
from engine_service.errors import CheckpointError, ConfigError, InvalidRequest, ModelError

NEW = hashlib.sha256(b"new").hexdigest()
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": VOCAB, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "eos_token_id": EOS,
}  # fmt: skip


def disk(folder="new", **fields) -> DiskSource:
    """Returns a folder as a source."""
    return DiskSource(folder=str(folder), **fields)


def text(value) -> bytes:
    """Returns JSON."""
    return json.dumps(value).encode()


@pytest.fixture
def stand(tmp_path):
    """An instance, and a folder of weights below its model root."""
    root = tmp_path / "models"
    root.mkdir()
    stand = Stand(root)
    stand.folder()
    return stand


@pytest.fixture
def signed(stand, tmp_path):
    """The instance reads what this key has signed, and nothing else."""
    key = Ed25519PrivateKey.generate()
    pem = tmp_path / "key.pem"
    pem.write_bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    stand.updates._root = ModelRoot(stand.root, pem)

    def sign(lines: dict[str, str], *, raw: bool = False) -> None:
        sums = "".join(f"{digest}  {name}\n" for name, digest in lines.items()).encode()
        signature = key.sign(sums)
        (stand.root / "new" / SUMS).write_bytes(sums)
        (stand.root / "new" / SIGNATURE).write_bytes(
            signature if raw else base64.encodebytes(signature)
        )

    return sign


async def refused(stand, update, error, words) -> None:
    """The update fails with these words, and nothing has changed."""
    before, done = stand.facts(), stand.steps.log.count("ApplyUpdate")
    with pytest.raises(error, match=words):
        await stand.update(update)
    assert stand.facts() == before
    assert stand.updates.current is None
    assert stand.steps.log.count("ApplyUpdate") == done


async def test_a_folder_by_its_whole_path(stand):
    """Relative to the root or absolute; through links, as long as they stay below it."""
    (stand.root / "latest").symlink_to(stand.root / "new")
    for epoch, name in enumerate(("new", stand.root / "new", "latest", "x/../new/."), start=2):
        (stand.root / "x").mkdir(exist_ok=True)
        await stand.update(wanted(disk(name)))
        assert stand.instance.engine.weights.epoch == epoch


async def test_a_file_that_is_a_link_out_of_the_root(stand, tmp_path):
    """S44: weights and small files alike."""
    secret = tmp_path / "secret"
    secret.write_bytes(b"{}")
    for name in ("model.safetensors", "tokenizer.json", SUMS):
        folder = stand.folder("linked")
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(secret)
        await refused(stand, wanted(disk("linked")), InvalidRequest, "outside the model root")
        (folder / name).unlink()


async def test_a_folder_that_is_swapped_after_the_begin(stand, tmp_path):
    """Where it leads is looked at again when it is read."""
    outside = tmp_path / "outside"
    (stand.root / "new").rename(outside)
    (stand.root / "new").mkdir()
    session = await stand.updates.begin(wanted(), Caller())
    (stand.root / "new").rmdir()
    (stand.root / "new").symlink_to(outside)
    with pytest.raises(InvalidRequest, match="outside the model root"):
        await stand.updates.stage(session.name)


async def test_sums_that_are_given(stand):
    """By the request or the folder: files are those, and weights that are not among them no use."""
    await stand.update(wanted(disk(sha256={"model.safetensors": NEW.upper()})))
    old = hashlib.sha256(b"old").hexdigest()
    for sums, words in (
        ({"model.safetensors": old}, "SHA-256 is not the one"),
        ({"other.safetensors": NEW}, "other.safetensors: No such file"),
        ({"tokenizer.json": NEW}, "model.safetensors is not among the files"),
    ):
        await refused(stand, wanted(disk(sha256=sums)), CheckpointError, words)
    (stand.root / "new" / SUMS).write_text(f"{old} *model.safetensors\n")
    await refused(stand, wanted(), CheckpointError, "SHA-256 is not the one")
    both = disk(sha256={"model.safetensors": NEW})
    await refused(stand, wanted(both), CheckpointError, "says another SHA-256")
    for line in ("nonsense", f"{NEW}  ../model.safetensors", f"\\{NEW}  model.safetensors"):
        (stand.root / "new" / SUMS).write_text(line)
        await refused(stand, wanted(), CheckpointError, "names no file of the folder")


async def test_a_file_that_is_replaced_while_it_is_read(stand, monkeypatch):
    """What was hashed must be what the ranks have read: the same inode, size and time."""
    path = stand.root / "new" / "model.safetensors"
    hash_it = Hashing._hash

    def swap(hashing, name):
        found = hash_it(hashing, name)
        path.with_name("other").write_bytes(b"new")
        path.with_name("other").rename(path)
        return found

    monkeypatch.setattr(Hashing, "_hash", swap)
    stand.steps.hold_at = "StageDisk"

    async def release_when_swapped():
        inode = path.stat().st_ino
        await stand.steps.reached.wait()
        await eventually(lambda: path.stat().st_ino != inode)
        stand.steps.release.set()

    releasing = asyncio.ensure_future(release_when_swapped())
    await refused(
        stand, wanted(disk(sha256={"model.safetensors": NEW})), CheckpointError, "was replaced"
    )
    await releasing


async def test_ranks_that_read_other_files(stand):
    """Two ranks have read two files of one name: half of one, half of the other."""
    do = stand.ranks._do

    def replaced_between(rank, command):
        reply = do(rank, command)
        if isinstance(command, StageDisk) and rank == 0:
            path = stand.root / "new" / "model.safetensors"
            os.utime(path, ns=(1, 1))
        return reply

    stand.ranks._do = replaced_between
    await refused(stand, wanted(), CheckpointError, "was replaced while it was read")


async def test_a_signature(stand, signed):
    """Raw or in base64; of just this list, by just this key, over every file that is used."""
    sums = {"model.safetensors": NEW}
    signed(sums)
    await stand.update(wanted())
    signed(sums, raw=True)
    await stand.update(wanted())
    folder = stand.root / "new"
    (folder / "generation_config.json").write_bytes(b"{}")
    await refused(stand, wanted(), CheckpointError, "generation_config.json is not among")
    await refused(
        stand, wanted(disk(sha256={"generation_config.json": NEW})), CheckpointError, "not among"
    )
    signed({**sums, "generation_config.json": hashlib.sha256(b"{}").hexdigest()})
    await stand.update(wanted())
    (folder / SUMS).write_bytes((folder / SUMS).read_bytes() + b"\n")
    await refused(stand, wanted(), CheckpointError, "does not sign")
    (folder / SIGNATURE).write_bytes(b"not base64!")
    await refused(stand, wanted(), CheckpointError, "does not sign")
    (folder / SIGNATURE).unlink()
    await refused(stand, wanted(), CheckpointError, "No such file")


def test_a_key_that_cannot_be_used(tmp_path):
    """It is said at the start, not at the first update."""
    other = X25519PrivateKey.generate().public_key()
    for name, data in (
        ("missing", None),
        ("text", b"hello"),
        ("kind", other.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)),
    ):
        path = tmp_path / name
        if data:
            path.write_bytes(data)
        with pytest.raises(ConfigError, match=name):
            ModelRoot(tmp_path, path)


def test_the_root_lies_where_the_model_lies(tmp_path):
    """Unless another one is named."""
    stand = Stand(tmp_path)
    stand.instance.config = type(stand.instance.config)(
        model=str(tmp_path / "models" / "first"), listen="127.0.0.1:0"
    )
    (tmp_path / "models" / "second").mkdir(parents=True)
    assert UpdateSessions(stand.instance)._root.folder("second") == tmp_path / "models" / "second"


def test_hashing_gives_way(tmp_path):
    """It runs in a thread of its own, at the lowest priority; no other thread gets it."""
    (tmp_path / "a.safetensors").write_bytes(b"new")
    seen = {}

    class Spied(Hashing):
        def _hash(self, name):
            seen["hashing"] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
            return super()._hash(name)

    async def run():
        found = await Spied(tmp_path, {"a.safetensors": NEW}, 0).run()
        seen["others"] = await asyncio.to_thread(
            lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
        )
        return found

    found = asyncio.run(run())
    assert (found["a.safetensors"].nbytes, seen["hashing"]) == (3, 19)
    assert seen["others"] == os.getpriority(os.PRIO_PROCESS, 0)


async def test_a_file_that_is_written_while_it_is_hashed(tmp_path):
    """Its bytes may be those that were meant, half of them of another time."""
    path = tmp_path / "a.safetensors"
    path.write_bytes(b"new")
    hashing = Hashing(tmp_path, {path.name: NEW}, 0)

    class Writing:
        def delay(self, nbytes):
            os.utime(path, ns=(1, 1))
            return 0

    hashing._bucket = Writing()
    with pytest.raises(CheckpointError, match="was changed while it was read"):
        await hashing.run()


# Files that travel


def with_config(stand, **changes) -> None:
    """Lets a model serve that has a whole configuration."""
    files = {**stand.instance.files, "config.json": text(CONFIG | changes)}
    stand.instance.files = files


async def test_a_tokenizer_that_travels(stand):
    """It serves with the weights, and not before; what is in flight goes on with its own."""
    with_config(stand)
    before = stand.instance.codec
    template = b"{{ messages[0].content }}!"
    stand.instance.files["chat_template.jinja"] = b"old"
    stand.folder(**{
        "config.json": text(CONFIG | {"eos_token_id": 7}),
        "tokenizer.json": byte_level_tokenizer().to_str().encode(),
        "tokenizer_config.json": text({"chat_template": template.decode()}),
    })  # fmt: skip
    session = await stand.updates.begin(wanted(), Caller())
    await stand.updates.stage(session.name)
    assert stand.instance.codec is before
    await session.commit()
    codec = stand.instance.codec
    assert (7 in codec.end_ids, EOS in codec.end_ids) == (True, False)
    # A template of before would come first; nothing of the old tokenizer is left.
    assert codec.encode_chat([{"role": "user", "content": "hi"}]) == codec.encode("hi!")
    assert "chat_template.jinja" not in stand.instance.files


async def test_files_of_the_request(stand):
    """They come before those of the folder, each by itself."""
    stand.folder(**{"generation_config.json": text({"eos_token_id": 5})})
    files = {"generation_config.json": text({"eos_token_id": 6})}
    await stand.update(wanted(files=files))
    assert {6, EOS} <= stand.instance.codec.end_ids
    assert 5 not in stand.instance.codec.end_ids
    assert stand.ranks.arenas_hold == contents_of(b"new")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"vocab_size": VOCAB + 4}, f"vocab_size is {VOCAB} here and {VOCAB + 4} there"),
        ({"hidden_size": 64}, "hidden_size is 32 here and 64 there"),
        ({"num_hidden_layers": 3}, "layers is 2 here and 3 there"),
        ({"rope_theta": 5.0}, "rope"),
        ({"tie_word_embeddings": True}, "tied is False here and True there"),
    ],
)
async def test_another_model(stand, change, words):
    """S13: another format is refused, by the first thing in which it differs."""
    with_config(stand)
    stand.folder(**{"config.json": text(CONFIG | change)})
    await refused(stand, wanted(), InvalidRequest, words)


async def test_a_tokenizer_of_another_size(stand):
    """A token more is another vocabulary."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(["<|more|>"])
    stand.folder(**{"tokenizer.json": tokenizer.to_str().encode()})
    await refused(stand, wanted(), InvalidRequest, "tokens of tokenizer.json is 258 here and 259")


async def test_files_that_cannot_be_read(stand):
    """They are refused while what serves goes on."""
    stand.folder(**{"tokenizer.json": b"\x80\x04pickle"})
    await refused(stand, wanted(), ModelError, "tokenizer.json")
