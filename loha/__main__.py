"""`python -m loha` is the `loha` command."""

from loha.cli import main

main()
