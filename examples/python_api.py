# %% [markdown]
# recpipe from Python. Run it as a script, or cell by cell in a notebook; it trains on generated clicks and
# takes seconds. Nothing is written but what is asked for.

# %%
import tempfile

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

import recpipe
from recpipe.kit import GivenBatches, Schema, SparseFeature
from recpipe.plugin import Batch

SMALL = ["data.samples=20000", "data.table_scale=0.02", "data.batch_size=512", "trainer.eval_every=1.0"]

# %% A training. What follows model and data are words of the command line.
run = recpipe.train(None, None, *SMALL, "+plugin=hotline", "tiers=ssd", quiet=True)
quality, hotline = run.report["quality"], run.report["plugins"]["hotline"]
print(f"AUC {quality['auc']:.4f}, lookups of popular rows {hotline['popular_lookup_share']:.0%}")
run.close()  # or: with recpipe.train(...) as run

# %% Several in a row, to compare.
for policy in ("lru", "lfu"):
    with recpipe.train(None, None, *SMALL, f"tiers.policy={policy}", quiet=True) as run:
        print(f"{policy}: {run.report['io']['rows_read']:,} rows read from the cold tier")

# %% Batches of one's own: a list here; a DataLoader or a function epoch -> iterator will do.
random = torch.Generator().manual_seed(1)
schema = Schema(dense=("age",), sparse=(SparseFeature("user", 1000), SparseFeature("item", 200)))
taste = torch.randn(200, generator=random)


def clicks(size: int) -> Batch:
    """``size`` samples whose label depends on the item."""
    users = torch.randint(1000, (size,), generator=random)
    items = torch.randint(200, (size,), generator=random)
    one_each = torch.ones(2 * size, dtype=torch.int32)
    ids = KeyedJaggedTensor(["user", "item"], torch.cat((users, items)), lengths=one_each)
    labels = torch.bernoulli(torch.sigmoid(3 * taste[items]), generator=random)
    return Batch(torch.rand((size, 1), generator=random), ids, labels)


train, held_out = [clicks(256) for _ in range(60)], [clicks(256) for _ in range(4)]
data = GivenBatches(train, held_out, schema)

# %% With an output directory: report.html, checkpoints and the rest, as from the command line.
with tempfile.TemporaryDirectory() as folder:
    with recpipe.train(None, data, "optim.tables.lr=0.1", output=folder, quiet=True) as run:
        print(f"AUC {run.report['quality']['auc']:.4f} on batches of one's own")
        scores = run.predict(held_out[0])
    model = recpipe.load(run.checkpoint)  # a module of torch and TorchRec alone
    with torch.no_grad():
        again = model(held_out[0].dense_features, held_out[0].sparse_features).squeeze(1)
        print(f"largest difference after loading: {(again - scores).abs().max():.1e}")
