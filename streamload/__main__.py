"""``python -m streamload``: the command line."""

from streamload.cli import main

main()
