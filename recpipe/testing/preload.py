"""What the server of ``recpipe.testing.apart`` does before it forks the first process."""

from recpipe.testing.process import libraries

libraries()
