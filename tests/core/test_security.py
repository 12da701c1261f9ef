"""Where a service may listen, whose tokens it takes, and which files it refuses."""

import itertools
import logging
import re

import pytest
from certificates import ALL_SCOPES, TOKEN, Authority, Tokens
from cryptography.hazmat.primitives import serialization

from engine_service import errors as engine_errors
from engine_service.config import EngineConfig
from relay_service.config import RelayConfig
from relay_service.core.security import Security, is_loopback
from relay_service.core.tls_files import TlsFiles
from relay_service.core.tokens import TokenFile, read_tokens
from relay_service.errors import ConfigError

FILES = {"tls_cert": "c", "tls_key": "k", "tls_ca": "a", "token_file": "t"}
OTHER = "another-token-of-somebody"


@pytest.fixture
def tokens(tmp_path):
    """A token file that is not written yet."""
    return Tokens(tmp_path / "tokens")


def allowed(listen: str, **settings) -> bool:
    """Returns whether both services take a setting; they must agree."""
    security = Security(**settings)
    verdicts = []
    for make in (
        lambda: RelayConfig(listen=listen, security=security),
        lambda: EngineConfig(model="m", listen=listen, security=security),
    ):
        try:
            make()
        except (ConfigError, engine_errors.ConfigError):
            verdicts.append(False)
        else:
            verdicts.append(True)
    assert verdicts[0] == verdicts[1]
    return verdicts[0]


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "10.1.2.3:7400", "[::]:0", "127.example.org:1"])
def test_beyond_loopback_everything_is_needed(listen):
    """Every subset of the four files is refused beyond loopback, save all and `--insecure`."""
    for count in range(len(FILES) + 1):
        for names in itertools.combinations(FILES, count):
            given = {name: FILES[name] for name in names}
            assert allowed(listen, **given) == (len(names) == len(FILES))
    assert allowed(listen, insecure=True)


@pytest.mark.parametrize("listen", ["127.0.0.1:0", "127.8.9.1:1", "localhost:7400", "[::1]:65535"])
def test_on_loopback_all_are_optional(listen):
    """On loopback a service goes without, with a token file, or with whole TLS; not with half."""
    assert allowed(listen)
    assert allowed(listen, token_file="t")
    assert allowed(listen, tls_cert="c", tls_key="k", tls_ca="a")
    for name in ("tls_cert", "tls_key", "tls_ca"):
        assert not allowed(listen, **{name: "x"})


@pytest.mark.parametrize("listen", ["", "127.0.0.1", "127.0.0.1:", ":1", "127.0.0.1:65536", "h:²"])
def test_what_is_no_address(listen):
    """Anything but HOST:PORT is refused, insecure or not."""
    assert not allowed(listen, insecure=True)


def test_a_refusal_names_what_is_missing():
    """It says which flags would help."""
    with pytest.raises(ConfigError, match="--tls-key, --token-file is missing") as refused:
        RelayConfig(listen="0.0.0.0:1", security=Security(tls_cert="c", tls_ca="a"))
    assert refused.value.details["hint"]


def test_names_are_not_loopback():
    """A name that merely looks like loopback may lead anywhere."""
    assert not is_loopback("127.0.0.1.example.org:1")
    assert not is_loopback("localhost.example.org:1")


def test_scopes(tokens):
    """A token allows what its line says; an unknown one nothing."""
    file = TokenFile(tokens.write("# people", f"generate {TOKEN}", "", f"control,relay {OTHER}"))
    assert file.scopes_of(TOKEN) == {"generate"}
    assert file.scopes_of(OTHER) == {"control", "relay"}
    assert file.scopes_of(TOKEN + "x") is None
    assert file.scopes_of("") is None
    assert (file.own(), file.own("relay")) == (TOKEN, OTHER)
    assert TokenFile(tokens.write(f"generate {TOKEN}")).own("relay") == ""


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "no token"),
        (["# nothing"], "no token"),
        ([TOKEN], "line 1"),
        ([f"generate {TOKEN} more"], "line 1"),
        (["generate short-secret"], "less than 16"),
        ([f"generate {OTHER}", f"everything {TOKEN}"], "line 2"),
        ([f" , {TOKEN}"], "line 1"),
        ([f"generate {TOKEN}", f"relay {TOKEN}"], "twice"),
        (["generate secret-with-a,comma-inside"], "characters"),
        ([f"generate {TOKEN}é"], "ASCII"),
        ([f"generate {TOKEN}"] + ["# " + "x" * 100] * 700, "at most"),
    ],
)
def test_token_files_that_are_refused(tokens, lines, message):
    """A wrong line is refused by its number, and no message carries a token."""
    path = tokens.write(*lines)
    with pytest.raises(ConfigError, match=message) as refused:
        read_tokens(path)
    assert not any(secret in str(refused.value) for secret in (TOKEN, OTHER, "secret"))


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o620, 0o606, 0o601])
def test_a_token_file_that_others_can_open(tokens, mode):
    """Only its owner may be able to open a token file."""
    with pytest.raises(ConfigError, match="others") as refused:
        read_tokens(tokens.write(f"generate {TOKEN}", mode=mode))
    assert "chmod 600" in refused.value.details["hint"]


def test_no_token_file(tmp_path):
    """A file that is not there, or a folder, is refused by name."""
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(ConfigError, match=re.escape(str(path))):
            read_tokens(str(path))


def test_tokens_change_without_a_restart(tokens, caplog):
    """New lines count at the next question; a broken file changes nothing and is logged once."""
    file = TokenFile(tokens.write(f"{ALL_SCOPES} {TOKEN}"))
    tokens.write(f"generate {OTHER}")
    assert (file.scopes_of(TOKEN), file.scopes_of(OTHER)) == (None, {"generate"})
    for broken in (("nonsense",), (f"generate {TOKEN}",)):
        caplog.clear()
        tokens.write(*broken, mode=0o600 if broken == ("nonsense",) else 0o644)
        assert [file.scopes_of(OTHER), file.scopes_of(OTHER)] == [{"generate"}] * 2
        assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1
    tokens.path.unlink()
    assert file.scopes_of(OTHER) == {"generate"}
    tokens.write(f"relay {TOKEN}")
    assert (file.scopes_of(TOKEN), file.scopes_of(OTHER)) == ({"relay"}, None)
    assert not any(secret in caplog.text for secret in (TOKEN, OTHER))


def test_certificates_change_without_a_restart(tmp_path, caplog):
    """A new pair counts; a key that does not belong to its certificate does not, until it does."""
    authority = Authority(tmp_path)
    files = TlsFiles(authority.issue("one"))
    first = files.fresh()
    assert files.fresh() is first
    authority.issue("two")
    (tmp_path / "two.pem").replace(tmp_path / "one.pem")
    assert [files.fresh(), files.fresh()] == [first, first]
    assert caplog.text.count("stays in use") == 1
    (tmp_path / "two.key").replace(tmp_path / "one.key")
    second = files.fresh()
    assert second.cert == (tmp_path / "one.pem").read_bytes() != first.cert
    (tmp_path / "ca.pem").unlink()
    assert files.fresh() is second
    assert "BEGIN" not in caplog.text + repr(second)


@pytest.mark.parametrize("victim", ["one.pem", "one.key", "ca.pem"])
@pytest.mark.parametrize("content", [None, b"", b"no PEM", b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_certificates_that_are_refused(tmp_path, victim, content):
    """A file that is missing or is not what it should be is refused by name at start."""
    security = Authority(tmp_path).issue("one")
    (tmp_path / victim).unlink()
    if content is not None:
        (tmp_path / victim).write_bytes(content)
    with pytest.raises(ConfigError, match=re.escape(victim)):
        TlsFiles(security)


def test_a_key_with_a_password(tmp_path):
    """It is refused; nobody is asked for the password."""
    security = Authority(tmp_path).issue("one")
    key = serialization.load_pem_private_key((tmp_path / "one.key").read_bytes(), None)
    (tmp_path / "one.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )
    with pytest.raises(ConfigError, match=r"one\.key"):
        TlsFiles(security)
