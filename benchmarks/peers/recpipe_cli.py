"""recpipe on the same files, as a user runs it: ``python -m recpipe data=npy ...`` and its report.

python benchmarks/peers/recpipe_cli.py DIR [OVERRIDE ...]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from work import TABLES, setting_of, versions


def recipe(directory: Path, run: Path) -> list[str]:
    """Overrides that make the work of ``directory``; all else is recpipe's default."""
    setting = setting_of(directory)
    return [
        "data=npy",
        f"data.path={directory}",
        f"data.tables={json.dumps(TABLES).replace(chr(34), '')}",
        "data.eval_fraction=0.0",
        f"data.batch_size={setting.batch}",
        f"data.cache_dir={directory / 'cache'}",
        f"model.embedding_dim={setting.dim}",
        f"model.bottom={list(setting.bottom)}",
        f"model.top={list(setting.top)}",
        "trainer.checkpoint_every=null",
        f"hydra.run.dir={run}",
    ]


def main() -> None:
    directory, overrides = Path(sys.argv[1]), sys.argv[2:]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "recpipe", *recipe(directory, Path(folder)), *overrides]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(done.stderr)
        report = json.loads(Path(folder, "report.json").read_text())
    found = {  # without the first steps, as every peer is timed
        "samples_per_second": report["throughput"]["steady_samples_per_second"],
        "versions": versions("torch", "torchrec", "recpipe"),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
