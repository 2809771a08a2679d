"""``python -m recpipe``."""

from recpipe.cli import main

if __name__ == "__main__":
    main()
