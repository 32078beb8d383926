"""`python -m loka`: the command line where the `loka` script is not on the path."""

from loka.cli import main

if __name__ == "__main__":
    main()
