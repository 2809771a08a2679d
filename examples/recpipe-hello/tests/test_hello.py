from unittest.mock import Mock

import pytest
import torch
from recpipe_hello.plugin import Hello, LookupCounter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recpipe import RunFigures, TableInfo, UserError
from recpipe.plugin import Batch
from recpipe.testing import PluginSuite


class TestHello(PluginSuite):
    plugin = "hello"


def test_counts_lookups() -> None:
    counter = LookupCounter({"user": TableInfo("user", 10, 4)}, top=0.1)
    ids = KeyedJaggedTensor(["user"], torch.tensor([3, 3, 3, 7]), lengths=torch.tensor([2, 2]))
    batch = Batch(torch.zeros(2, 1), ids, torch.zeros(2))
    run = Mock(spec=RunFigures, lookups=4)
    with counter.observe(batch):
        assert counter.figures(run)["distinct_rows"] == 0
    assert counter.figures(run) == {"distinct_rows": 2, "top_share": 0.75}


def test_refuses_a_share_that_is_none() -> None:
    with pytest.raises(UserError, match=r"plugins.hello.top=0: must be in \(0, 1\]"):
        Hello(top=0)
