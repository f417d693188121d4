"""`python -m curvoscope`: the command line."""

from curvoscope.cli import main

if __name__ == "__main__":
    main()
