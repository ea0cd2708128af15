"""`python -m flash3`."""

from .cli import main

main()
