"""What task=scale predicts against figures that others have published; no constant is fitted to them.

    python benchmarks/scale_published.py [--json FILE]

MLPerf's rates are of training alone: of each run's log the samples between two evaluations over the seconds
between the end of one and the begin of the next, the median of all runs; its times are the submission's
results, evaluations included. The tables of docs/guide/scale.md are this script's output.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from recpipe_perf_model.scale.machine import machine
from recpipe_perf_model.scale.model import paper_model
from recpipe_perf_model.scale.placing import Training
from recpipe_perf_model.scale.predict import Prediction, predict

GRAPH, EAGER, UNKNOWN, FEW = "MLPerf, HugeCTR", "eager frameworks", "shapes not published", "CPU hosts"
REASONS = {
    GRAPH: "On several hosts the network and the overlap behave at their best on paper, and software gained "
    "up to 61% between v3.0 and v4.0 on the same machines. DLRM of v2.0 on several hosts is faster than on "
    "paper: NVIDIA's hybrid embedding keeps frequent rows on every GPU and sends less.",
    EAGER: "Loaders, input pipelines and Python are not counted beside 10 us an operator, and small batches "
    "wait for them. TorchRec's run on one GPU reads rows over the bus without a cache. TensorFlow's ran "
    "under XLA, which fuses operators that are counted one by one here.",
    UNKNOWN: "The number of tables is known to an order of magnitude, widths and poolings as means, and "
    "the skew, on which rows in host memory depend, is not published. The rates themselves are recalled from "
    "the paper and were not read again.",
    FEW: "Half of the data sheet's peak for products and 80% of its bandwidth, both assumed.",
}


@dataclass(frozen=True)
class Published:
    """A published rate, and what it was measured on."""

    where: str
    kind: str
    model: str
    machine: str
    gpus: int
    batch: int
    samples_per_second: float
    precision: str = "fp16"
    messages: str = "fp32"
    tiers: str = "hbm"
    minutes: float | None = None
    """To the model's quality."""

    def predicted(self) -> Prediction:
        """On paper."""
        graph = self.kind == GRAPH
        training = Training(
            paper_model(self.model),
            machine(self.machine),
            self.gpus,
            self.batch,
            self.precision,
            message_bytes=2 if graph or self.messages != "fp32" else 4,
            gradient_bytes=2 if graph else 4,
            eager=not graph,
        )
        return predict(training, self.tiers)


def _mlperf(
    where: str, model: str, host: str, gpus: int, batch: int, millions: float, minutes: float | None = None
) -> Published:
    return Published(where, GRAPH, model, host, gpus, batch, millions * 1e6, minutes=minutes)


NEW, OLD = "dlrm_dcnv2", "dlrm_criteo_tb"
MLPERF = [
    # mlcommons/training_results_v3.0 at 63e326c, v3.1 at d06288b, v4.0 at 6fe9543, v2.0 at 8437fbb7.
    _mlperf("v3.0 NVIDIA, DGX H100", NEW, "h100_hgx", 8, 55296, 14.51, 4.184),
    _mlperf("v3.1 NVIDIA, DGX H100", NEW, "h100_hgx", 8, 55296, 15.26, 3.836),
    _mlperf("v4.0 NVIDIA, DGX H100", NEW, "h100_hgx", 8, 55296, 15.67, 3.844),
    _mlperf("v3.0 NVIDIA, 8 DGX H100", NEW, "h100_hgx", 64, 135168, 45.61, 1.760),
    _mlperf("v3.1 NVIDIA, 8 DGX H100", NEW, "h100_hgx", 64, 135168, 54.54, 1.380),
    _mlperf("v4.0 NVIDIA, 8 DGX H100", NEW, "h100_hgx", 64, 135168, 56.11, 1.347),
    _mlperf("v3.0 NVIDIA, 16 DGX H100", NEW, "h100_hgx", 128, 135168, 46.19, 1.613),
    _mlperf("v3.1 NVIDIA, 16 DGX H100", NEW, "h100_hgx", 128, 135168, 70.80, 1.022),
    _mlperf("v4.0 NVIDIA, 16 DGX H100", NEW, "h100_hgx", 128, 135168, 74.45, 0.990),
    _mlperf("v3.0 Dell, 4 H100", NEW, "h100_hgx", 4, 28000, 7.33),
    _mlperf("v4.0 Dell, 4 H100", NEW, "h100_hgx", 4, 28000, 7.57),
    _mlperf("v4.0 NVIDIA, HGX H200", NEW, "h200_hgx", 8, 55296, 16.99, 3.469),
    _mlperf("v3.0 Dell, 8 A100", NEW, "a100_hgx", 8, 55296, 7.74, 8.412),
    _mlperf("v4.0 Juniper, 8 DGX A100", NEW, "a100_hgx", 64, 135168, 26.76, 2.859),
    _mlperf("v2.0 Dell, 4 A100", OLD, "a100_hgx", 4, 55296, 20.74),
    _mlperf("v2.0 NVIDIA, DGX A100", OLD, "a100_hgx", 8, 55296, 40.80),
    _mlperf("v2.0 NVIDIA, 8 DGX A100", OLD, "a100_hgx", 64, 71680, 116.84),
    _mlperf("v2.0 NVIDIA, 14 DGX A100", OLD, "a100_hgx", 112, 71680, 127.27),
]
TORCHREC = [
    # facebookresearch/dlrm at 045094c, torchrec_dlrm/README.MD.
    Published("TorchRec, p4d", EAGER, OLD, "a100_p4d", gpus, batch, rate, "tf32", tiers=tiers)
    for gpus, batch, rate, tiers in (
        (8, 2048, 284_615, "hbm"),
        (1, 16384, 740_065, "dram"),
        (4, 16384, 1_458_176, "hbm"),
        (8, 16384, 1_671_168, "hbm"),
        (8, 65536, 5_373_952, "hbm"),
    )
]
TENSORFLOW = [
    # NVIDIA/DeepLearningExamples at d53419f, TensorFlow2/Recommendation/DLRM_and_DCNv2/doc/DLRM.md, model
    # "large"; its commands have --xla, those of mixed precision --amp.
    Published(
        f"TensorFlow 2 with XLA{' and AMP' if precision == 'fp16' else ''}, {name}",
        EAGER,
        OLD,
        host,
        gpus,
        65536,
        millions * 1e6,
        precision,
    )
    for name, host, gpus, precision, millions in (
        ("DGX A100", "a100_hgx", 8, "tf32", 10.9),
        ("DGX A100", "a100_hgx", 8, "fp16", 13.8),
        ("DGX-1", "v100_dgx1", 8, "fp32", 3.13),
        ("DGX-1", "v100_dgx1", 8, "fp16", 6.31),
        ("DGX-2", "v100_dgx2", 16, "fp32", 6.43),
        ("DGX-2", "v100_dgx2", 16, "fp16", 10.5),
    )
]
NEO = [
    # Mudigere et al., ISCA 2022: rates and batch sizes recalled, not read again (1.7M as other texts cite
    # it).
    Published(
        f"Neo, model {name} (recalled)",
        UNKNOWN,
        f"neo_{name.lower()}",
        "zionex",
        128,
        batch,
        rate,
        "tf32",
        "fp16",
        "dram",
    )
    for name, batch, rate in (("A", 65536, 1.2e6), ("I", 262144, 3.4e6), ("F", 65536, 1.7e6))
]
CPUS = [
    # mlcommons/training_results_v3.1 at d06288b, Intel/results/4-nodes-SPR-pytorch.
    Published("v3.1 Intel, 4 hosts", FEW, NEW, "cpu_spr", 8, 65536, 0.33e6, "bf16")
]
EVERY = [*MLPERF, *TORCHREC, *TENSORFLOW, *NEO, *CPUS]


def error(predicted: float, published: float) -> float:
    """Above 0: too fast on paper."""
    return predicted / published - 1


def gmae(errors: Iterable[float]) -> float:
    """Geometric mean of the errors' sizes."""
    return float(np.exp(np.mean(np.log(np.abs(list(errors)) + 4e-4))))


def factor(ratios: Sequence[float]) -> float:
    """The geometric mean by which predictions are off, either way."""
    return float(np.exp(np.mean(np.abs(np.log(ratios)))))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, help="write the rows to this file, too")
    said = parser.parse_args()
    found = [(each, each.predicted()) for each in EVERY]
    print("| published | model | GPUs | batch | samples/s published | predicted | error | bound by |")
    print("|---|---|--:|--:|--:|--:|--:|---|")
    for each, prediction in found:
        rate, bound = prediction.samples_per_second, next(iter(prediction.bounds))
        print(
            f"| {each.where} | {each.model} {each.precision} | {each.gpus} | {each.batch:,} | "
            f"{each.samples_per_second / 1e6:.2f}M | {rate / 1e6:.2f}M | "
            f"{error(rate, each.samples_per_second):+.0%} | {bound} |"
        )
    print("\n| time to quality | published | predicted | error |\n|---|--:|--:|--:|")
    times = []
    for each, prediction in found:
        seconds = prediction.seconds_to_quality()
        if each.minutes is not None and seconds is not None:
            times.append(error(seconds / 60, each.minutes))
            print(f"| {each.where} | {each.minutes:.2f} min | {seconds / 60:.2f} min | {times[-1]:+.0%} |")
    print("\n| class | figures | GMAE | mean factor | largest | known reason |\n|---|--:|--:|--:|--:|---|")
    kinds = {"all": [*REASONS], **{kind: [kind] for kind in REASONS}}
    for name, members in kinds.items():
        ratios = [
            prediction.samples_per_second / each.samples_per_second
            for each, prediction in found
            if each.kind in members
        ]
        errors = [ratio - 1 for ratio in ratios]
        print(
            f"| {name} | {len(errors)} | {gmae(errors):.0%} | {factor(ratios):.2f} | "
            f"{max(errors, key=abs):+.0%} | {REASONS.get(name, '')} |"
        )
    print(f"| time to quality | {len(times)} | {gmae(times):.0%} | | {max(times, key=abs):+.0%} | |")
    if said.json:
        rows = [
            {
                "where": each.where,
                "class": each.kind,
                "published": each.samples_per_second,
                "predicted": prediction.samples_per_second,
            }
            for each, prediction in found
        ]
        said.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
