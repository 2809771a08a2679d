"""``python -m recpipe``."""

from recpipe.cli import program

if __name__ == "__main__":
    program()
