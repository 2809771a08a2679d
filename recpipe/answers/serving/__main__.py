"""``python -m recpipe.answers.serving``: a worker, as the supervisor starts it."""

import sys

from recpipe.common.process import importing

with importing():
    from recpipe.answers.serving.worker import main

if __name__ == "__main__":
    sys.exit(main())
