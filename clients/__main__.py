"""`python -m clients` is the `seedrelay` command."""

from clients.cli import main

main()
