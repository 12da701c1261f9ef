"""The small files of a model, and whose an empty target takes."""

import pytest
from fakes import instance

from engine_service.core import model_files
from engine_service.core.model_files import choose_offer, read_folder
from engine_service.errors import ConfigError, ModelError
from relay_service.core.format import Format
from relay_service.core.instance import FILLING_EPOCH, Artifact, Filling, State, Weights

FILES = (Artifact("config.json", 2, "0" * 64),)
OTHER = Format((("config.hidden_size", "65"),))


def offer(name: str, model: str = "tiny", **changes):
    """Returns an instance that offers its model's files."""
    return instance(name, model=model, artifacts=FILES, **changes)


def test_nobody_offers():
    """Without a complete holder that has files there is nothing to take yet."""
    assert choose_offer([], "") is None
    bare = instance("bare")
    dummy = offer("dummy", state=State.DUMMY)
    assert choose_offer([bare, dummy], "") is None


def test_one_offer():
    """The only model on offer is taken, from any that holds it."""
    offers = [offer("a"), offer("b")]
    assert choose_offer(offers, "").instance == "a"


def test_several_models():
    """With several models on offer and none named, the error lists them."""
    offers = [offer("a", "small"), offer("b", "large", format=OTHER)]
    with pytest.raises(ConfigError, match=r"large \(from b\), small \(from a\)") as refused:
        choose_offer(offers, "")
    assert "--from" in refused.value.details["hint"]


def test_models_of_one_shape():
    """A base model and its fine-tune are two, though their bytes would fit each other."""
    offers = [offer("a", "base"), offer("b", "tuned", weights=Weights("v1", "other digest", 1))]
    with pytest.raises(ConfigError, match=r"base \(from a\), tuned \(from b\)"):
        choose_offer(offers, "")
    assert choose_offer(offers, "tuned").instance == "b"


def test_one_model_by_several_names():
    """Instances with equal weights offer one model, as do versions of one that is rolled out."""
    assert choose_offer([offer("a", "tiny"), offer("b", "folder-of-b")], "").instance == "a"
    newer = offer("b", weights=Weights("v2", "other digest", 2))
    assert choose_offer([offer("a"), newer], "").instance == "a"


@pytest.mark.parametrize(("wanted", "expected"), [("b", "b"), ("large", "b"), ("small", "a")])
def test_named_by_instance_or_model(wanted, expected):
    """Among several, the one of that instance or model is taken."""
    offers = [offer("a", "small"), offer("b", "large", format=OTHER)]
    assert choose_offer(offers, wanted).instance == expected


def test_a_name_that_nobody_has_yet():
    """A named model that is not there yet is waited for."""
    assert choose_offer([offer("a")], "later") is None


def test_only_known_files_are_read(tmp_path):
    """From a folder only the files that travel are read, and no folder of such a name."""
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "secret.txt").write_bytes(b"secret")
    (tmp_path / "tokenizer.json").mkdir()
    assert read_folder(tmp_path) == {"config.json": b"{}"}


def test_no_folder(tmp_path):
    """A folder that is not there is refused with a hint how to get one."""
    with pytest.raises(ConfigError, match="is not a folder") as refused:
        read_folder(tmp_path / "none")
    assert "model fetch" in refused.value.details["hint"]


def test_a_file_that_is_too_large_to_travel(tmp_path, monkeypatch):
    """A small file that is not small is refused by name."""
    monkeypatch.setattr(model_files, "MAX_ARTIFACT_BYTES", 10)
    (tmp_path / "config.json").write_bytes(bytes(11))
    with pytest.raises(ModelError, match=r"config\.json is larger than 10 bytes"):
        read_folder(tmp_path)


def filling(name: str, digest: str = "digest", model: str = "tiny"):
    """Returns an incomplete instance that has its model's files; it may call itself anything."""
    coming = Filling(model, "v1", digest, FILLING_EPOCH + 1, "seed")
    return offer(name, "dummy", state=State.DUMMY, weights=Weights(), filling=coming)


def test_files_of_one_that_is_being_filled():
    """They are taken where no complete holder is there, as those of the model that is coming."""
    assert choose_offer([filling("a")], "").instance == "a"
    assert choose_offer([filling("a"), offer("b")], "").instance == "b"
    assert choose_offer([filling("a")], "tiny").model == "tiny"
    assert choose_offer([filling("a")], "dummy") is None
    with pytest.raises(ConfigError, match=r"base \(from b\), tiny \(from a\)"):
        choose_offer([filling("a"), filling("b", "other digest", "base")], "")
