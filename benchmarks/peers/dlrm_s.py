"""facebookresearch/dlrm's ``dlrm_s_pytorch.py``: its model and optimizers in the loop of its ``run``.

python benchmarks/peers/dlrm_s.py DIR --checkout DLRM [--optimizer rwsadagrad|sgd]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from work import DENSE, EPSILON, LEARNING_RATE, Clock, Work, as_is


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--checkout", type=Path, required=True)
    parser.add_argument("--optimizer", choices=["rwsadagrad", "sgd"], default="rwsadagrad")
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.checkout))
    from dlrm_s_pytorch import DLRM_Net  # type: ignore[import-not-found]
    from optim.rwsadagrad import RWSAdagrad  # type: ignore[import-not-found]

    work = Work.load(arguments.directory)
    setting, tables = work.setting, len(work.tables)
    bottom = [DENSE, *setting.bottom, setting.dim]
    top = [tables * (tables + 1) // 2 + setting.dim, *setting.top, 1]
    model = DLRM_Net(
        setting.dim,
        np.array(list(work.tables.values())),
        np.array(bottom),
        np.array(top),
        arch_interaction_op="dot",
        sigmoid_top=len(top) - 2,
    )
    if arguments.optimizer == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    else:
        optimizer = RWSAdagrad(model.parameters(), lr=LEARNING_RATE, eps=EPSILON)
    offsets = torch.arange(setting.batch).repeat(tables, 1)
    clock = Clock(work, as_is)
    for batch in clock:
        loss = model.loss_fn(model(batch.dense, offsets, batch.ids), batch.labels.unsqueeze(1))
        loss.detach().cpu().numpy()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    clock.report()


if __name__ == "__main__":
    main()
