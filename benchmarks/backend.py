"""Dense parts of TorchRec's models on this CPU: modules as they are beside recpipe.backend's conversion.

    python benchmarks/backend.py [--models dlrm dcn deep_fm] [--batches 128 512 2048 8192] [--dims 16 64]
                                 [--threads 1 2] [--rounds 5] [--cache DIR]

A step is forward, loss and backward, from dense features and pooled rows of 26 tables to the gradients of the
rows and of all parameters; tables and optimizers are left out. Milliseconds, medians over interleaved rounds.
"cpu" converts everything with the measured linear layers, "auto" only what was measured to be faster. The
process has recpipe's settings (allocator, matrix products). To imitate a CPU with AVX2 alone:

    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 python benchmarks/backend.py
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from time import perf_counter
from typing import Any

from recpipe.backend.allocator import bound_kernel_caches, tune_allocator

tune_allocator()
bound_kernel_caches()

import torch  # noqa: E402
from torch import nn  # noqa: E402
from torchrec.models.deepfm import SimpleDeepFMNN  # noqa: E402
from torchrec.models.dlrm import DLRM, DLRM_DCN  # noqa: E402
from torchrec.modules.embedding_configs import EmbeddingBagConfig  # noqa: E402
from torchrec.sparse.jagged_tensor import KeyedTensor  # noqa: E402

from recpipe.backend.calibrate import calibrated  # noqa: E402
from recpipe.backend.choices import Host  # noqa: E402
from recpipe.backend.convert import convert  # noqa: E402
from recpipe.backend.matmul import float32_products  # noqa: E402
from recpipe.common.timing import median_seconds  # noqa: E402
from recpipe.tables.group_rows import marked  # noqa: E402

FEATURES, DENSE = 26, 13
BOTTOM, TOP = (512, 256, 64), (512, 256)
MODELS = ("dlrm", "dcn", "deep_fm")


class Rows(nn.Module):
    """In the place of a collection: it hands out the pooled rows that it is given."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.names = [f"C{number}" for number in range(FEATURES)]
        self.dim = dim

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return [
            EmbeddingBagConfig(name=n, embedding_dim=self.dim, num_embeddings=1, feature_names=[n])
            for n in self.names
        ]

    def forward(self, values: torch.Tensor) -> KeyedTensor:
        return KeyedTensor(self.names, [self.dim] * FEATURES, values)


def model(name: str, dim: int) -> Any:
    torch.manual_seed(0)
    rows: Any = Rows(dim)
    if name == "deep_fm":
        return SimpleDeepFMNN(DENSE, rows, hidden_layer_size=BOTTOM[0], deep_fm_dimension=TOP[1])
    if name == "dcn":
        return DLRM_DCN(rows, DENSE, [*BOTTOM, dim], [*TOP, 1], dcn_num_layers=3, dcn_low_rank_dim=64)
    return DLRM(rows, DENSE, [*BOTTOM, dim], [*TOP, 1])


class Step:
    """One model's step over the same random batch, with or without room in front of its rows."""

    def __init__(self, name: str, dim: int, batch: int, room: bool) -> None:
        self.model = model(name, dim)
        torch.manual_seed(1)
        self.dense, self.labels = torch.randn(batch, DENSE), torch.rand(batch, 1).round()
        rows = torch.randn(batch, FEATURES * dim)
        self.wide = torch.cat((torch.zeros(batch, dim), rows), dim=1) if room else rows
        self.room = dim if room else 0
        self.parameters = list(self.model.parameters())

    def __call__(self) -> None:
        rows = marked(self.wide[:, self.room :]) if self.room else self.wide.detach()
        rows.requires_grad_()
        out = self.model(self.dense, rows)
        loss = nn.functional.binary_cross_entropy_with_logits(out, self.labels)
        torch.autograd.grad(loss, [rows, *self.parameters])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["dlrm"])
    parser.add_argument("--batches", nargs="+", type=int, default=[128, 512, 2048, 8192])
    parser.add_argument("--dims", nargs="+", type=int, default=[16, 64])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", type=Path, help="where measured choices stay; by default nowhere")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, float32_products(torch.device("cpu")):
        host = Host.current()
        print(f"{host.processor}, {host.cores} cores, {host.instruction_set}, torch {host.torch_version}")
        print(
            f"load before: {os.getloadavg()[0]:.1f}; {arguments.rounds} rounds; calibration in s, rest in ms"
        )
        print("model    dim threads batch calibration    plain      cpu     auto  plain/cpu  plain/auto")
        for name in arguments.models:
            for dim in arguments.dims:
                for threads in arguments.threads:
                    for batch in arguments.batches:
                        line(name, dim, threads, batch, arguments.rounds, arguments.cache or Path(folder))
    sys.stdout.flush()


def line(name: str, dim: int, threads: int, batch: int, rounds: int, folder: Path) -> None:
    """Measure and print one row."""
    torch.set_num_threads(threads)
    plain, cpu, auto = (Step(name, dim, batch, room=made != "plain" and name == "dlrm") for made in KINDS)
    started = perf_counter()
    choices = calibrated(plain.model, batch, [threads], folder)
    spent = perf_counter() - started
    convert(cpu.model, choices)
    convert(auto.model, choices, measured_only=True)
    times = [1e3 * seconds for seconds in median_seconds([plain, cpu, auto], rounds)]
    shown = " ".join(f"{ms:8.2f}" for ms in times)
    print(
        f"{name:8} {dim:3} {threads:7} {batch:5} {spent:11.1f} {shown} "
        f"{times[0] / times[1]:10.2f} {times[0] / times[2]:11.2f}",
        flush=True,
    )


KINDS = ("plain", "cpu", "auto")

if __name__ == "__main__":
    main()
