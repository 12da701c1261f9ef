"""The options of TLS and tokens, the same at every command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer

from clients.cli_run import refuse
from clients.credentials import Credentials
from relay_service.core.security import Security
from relay_service.errors import ConfigError

_OPTIONS = {
    "tls_ca": Annotated[
        str,
        typer.Option(envvar="SEEDRELAY_TLS_CA", help="CA that the other side must come from, PEM."),
    ],
    "tls_cert": Annotated[
        str, typer.Option(envvar="SEEDRELAY_TLS_CERT", help="Own certificate chain, PEM.")
    ],
    "tls_key": Annotated[
        str, typer.Option(envvar="SEEDRELAY_TLS_KEY", help="Private key of the certificate, PEM.")
    ],
    "token_file": Annotated[
        str,
        typer.Option(
            envvar="SEEDRELAY_TOKEN_FILE",
            help="Lines of `scope[,scope] token`; scopes are generate, control, relay.",
        ),
    ],
}


def with_security(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a service's command the four options; it receives them as one `security`."""
    return _with_options(command, "security", lambda security, _: security)


def with_credentials(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a client's command the four options; it receives `credentials`."""
    return _with_options(command, "credentials", lambda _, credentials: credentials)


def _with_options(
    command: Callable[..., None], receives: str, choose: Callable[[Security, Credentials], Any]
) -> Callable[..., None]:
    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        security = Security(**{name: kwargs.pop(name) for name in _OPTIONS})
        try:
            credentials = Credentials(security)
        except ConfigError as error:
            refuse(error)
        command(*args, **kwargs, **{receives: choose(security, credentials)})

    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.name != receives]
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default="", annotation=annotation)
        for name, annotation in _OPTIONS.items()
    ]
    wrapped.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
    wrapped.__annotations__ = {p.name: p.annotation for p in (*own, *added)}
    return wrapped
