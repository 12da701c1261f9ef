"""Runs the command line: `seedrelay`, or `python -m clients`."""

from __future__ import annotations

import os


def main() -> None:
    """Runs one command."""
    # gRPC's core, which reads this when it is imported, would write lines of its own form
    # into the log: one for every handshake that a stranger fails.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")
    from clients.cli import app

    app()


if __name__ == "__main__":
    main()
