"""`python -m curvoscope`: the command line."""

from curvoscope.cli import main

main()
