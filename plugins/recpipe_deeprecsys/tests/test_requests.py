"""What is asked, and what the named models are made of."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from recpipe_deeprecsys.config import BenchOptions
from recpipe_deeprecsys.models.rmc import RMC
from recpipe_deeprecsys.requests import requests_of, sizes_of
from recpipe_deeprecsys.shapes import Shapes, ShapesConfig, open_shapes
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from recpipe.config.compose import compose, plain_values
from recpipe.errors import UserError

OPTIONS = BenchOptions()


def shapes(**values: object) -> Shapes:
    defaults = {"name": "deeprecsys", "batch_size": 8, "eval_fraction": 0.1, "last_batch": "keep"}
    fitting = {key: value for key, value in defaults.items() if key in ShapesConfig.__dataclass_fields__}
    return open_shapes(ShapesConfig(**{**fitting, **values}), 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "tables_gb", "mflop", "row_bytes"),
    [("rmc1", 4.10, 0.20, 81_920), ("rmc2", 4.10, 0.64, 983_040), ("rmc3", 2.56, 6.41, 25_600)],
)
def test_rmc_is_what_deeprecsys_says(name: str, tables_gb: float, mflop: float, row_bytes: int) -> None:
    recipe = plain_values(compose([f"experiment={name}"]))
    data, own = recipe["data"], recipe["model"]
    (tables,) = data["tables"]
    count, rows, dim = tables["count"], tables["rows"], own["embedding_dim"]
    configs = [
        EmbeddingBagConfig(name=f"t{n}", embedding_dim=dim, num_embeddings=rows, feature_names=[f"t{n}"])
        for n in range(count)
    ]
    collection = EmbeddingBagCollection(configs, device=torch.device("meta"))
    model = RMC(collection, data["dense"], own["bottom"], own["top"])
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Linear)]
    assert sum(2 * layer.weight.numel() for layer in layers) / 1e6 == pytest.approx(mflop, abs=0.005)
    assert count * rows * dim * 4 / 1e9 == pytest.approx(tables_gb, abs=0.005)
    assert count * tables["lookups"] * dim * 4 == row_bytes


def test_tables_are_looked_up_exactly_so_often_whatever_is_read_together() -> None:
    data = shapes(
        samples=600, dense=2, tables=[{"rows": 50, "count": 2, "lookups": 3}, {"rows": 9, "history": 4}]
    )
    whole, part = data.samples_between(0, 520), data.samples_between(250, 260)
    assert [f.name for f in data.schema.sparse] == ["t0", "t1", "t2", "t2_history"]  # type: ignore[union-attr]
    assert data.schema.targets == {"t2_history": "t2"}  # type: ignore[union-attr]
    for name, lookups in (("t0", 3), ("t1", 3), ("t2", 1), ("t2_history", 4)):
        found, own = whole.sparse[name], part.sparse[name]
        assert set(found.lengths().tolist()) == {lookups}
        assert found.values().view(520, -1)[250:260].equal(own.values().view(10, -1))
    assert whole.dense[250:260].equal(part.dense)
    assert whole.labels[250:260].equal(part.labels)
    assert 0.1 < float(whole.labels.mean()) < 0.5
    assert int(whole.sparse["t2"].values().max()) < 9


def test_each_label_is_its_own() -> None:
    labels = shapes(samples=600, tables=[{"rows": 50}], labels=["a", "b"]).samples_between(0, 500).labels
    assert labels.shape == (500, 2)
    assert not labels[:, 0].equal(labels[:, 1])


def test_skewed_ids_are_skewed() -> None:
    def share(how: str) -> float:
        values = (
            shapes(samples=5000, tables=[{"rows": 1000}], ids=how)
            .samples_between(0, 4000)
            .sparse["t0"]
            .values()
        )
        return float(torch.bincount(values, minlength=1000).sort(descending=True).values[:10].sum()) / 4000

    assert share("skewed") > 1.8 * share("uniform")


def test_sizes_are_log_normal_with_deeprecsys_median() -> None:
    sizes = sizes_of(OPTIONS)
    assert np.median(sizes) == pytest.approx(np.exp(5.1), rel=0.02)
    assert np.log(sizes).std() == pytest.approx(0.2, rel=0.05)
    assert sizes_of(replace(OPTIONS, size_max=100)).max() == 100
    assert set(sizes_of(replace(OPTIONS, sizes=7)).tolist()) == {7}


def test_sizes_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "sizes.txt"
    file.write_text("100\n200\n200\n")
    found = np.bincount(sizes_of(replace(OPTIONS, sizes=str(file))))
    assert set(np.flatnonzero(found)) == {100, 200}
    assert found[200] / found[100] == pytest.approx(2, rel=0.2)


@pytest.mark.parametrize("content", ["", "1\n0\n", "a\n", "1.5\n", None])
def test_a_wrong_file_of_sizes_is_one_line(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "sizes.txt"
    if content is not None:
        file.write_text(content)
    with pytest.raises(UserError, match=r"sizes=.*sizes.txt") as caught:
        sizes_of(replace(OPTIONS, sizes=str(file)))
    assert "\n" not in str(caught.value)


def test_requests_are_ranges_of_the_candidates() -> None:
    found = requests_of(OPTIONS, 2000)
    assert all(0 <= low < high <= 2000 for low, high in found)
    with pytest.raises(UserError, match="candidates=100: a request has up to"):
        requests_of(OPTIONS, 100)
