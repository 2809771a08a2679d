"""deepctr-torch: a DLRM of its layers (it brings none of its own), in the loop of its ``fit``.

    python benchmarks/peers/deepctr.py DIR

Adagrad, no L2: its default of 1e-5 reads all rows of all tables in every step and is slower still.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from deepctr_torch.inputs import DenseFeat, SparseFeat  # type: ignore[import-not-found]
from deepctr_torch.layers import DNN, InnerProductLayer  # type: ignore[import-not-found]
from deepctr_torch.models.basemodel import BaseModel  # type: ignore[import-not-found]
from work import DENSE, LEARNING_RATE, Clock, Setting, Work


class Dlrm(BaseModel):  # type: ignore[misc]
    """Dot products of all pairs of the 26 embeddings and the bottom MLP's output."""

    def __init__(self, setting: Setting, tables: dict[str, int]) -> None:
        columns = [SparseFeat(n, rows, embedding_dim=setting.dim) for n, rows in tables.items()]
        columns += [DenseFeat("dense", DENSE)]
        super().__init__([], columns, l2_reg_linear=0, l2_reg_embedding=0)
        fields = len(tables) + 1
        self.bottom = DNN(DENSE, [*setting.bottom, setting.dim], init_std=0.05)
        self.products = InnerProductLayer()
        self.top = DNN(fields * (fields - 1) // 2 + setting.dim, list(setting.top), init_std=0.05)
        self.last = torch.nn.Linear(setting.top[-1], 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Click probabilities [B, 1] of ids and dense features side by side, float32 [B, 39]."""
        embedded, (dense,) = self.input_from_feature_columns(x, self.dnn_feature_columns, self.embedding_dict)
        bottom = self.bottom(dense)
        products = self.products([*embedded, bottom.unsqueeze(1)]).flatten(1)
        return self.out(self.last(self.top(torch.cat([bottom, products], dim=1))))  # type: ignore[no-any-return]


def main() -> None:
    work = Work.load(Path(sys.argv[1]))
    model = Dlrm(work.setting, work.tables)
    model.compile(torch.optim.Adagrad(model.parameters(), lr=LEARNING_RATE), "binary_crossentropy")
    model.train()
    clock = Clock(work, lambda b: (torch.cat([b.ids.T.float(), b.dense], dim=1), b.labels))
    for inputs, labels in clock:
        predicted = model(inputs).squeeze(-1)
        model.optim.zero_grad()
        loss = model.loss_func(predicted, labels, reduction="sum")
        total = loss + model.get_regularization_loss() + model.aux_loss
        loss.item(), total.item()
        total.backward()
        model.optim.step()
    clock.report("deepctr-torch")


if __name__ == "__main__":
    main()
