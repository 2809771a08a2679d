"""``python -m recpipe_serve``: a worker, as the supervisor starts it."""

import sys

from recpipe.common.process import importing

with importing():
    from recpipe_serve.workers.worker import main

if __name__ == "__main__":
    sys.exit(main())
