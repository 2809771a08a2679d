"""`recpipe doctor` with faked installations: each clash is named with the command that mends it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from recpipe.common import device
from recpipe.errors import UserError
from recpipe.tasks import doctor

CPU = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}
CUDA = {"torch": "2.13.0+cu130", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0"}

NEWEST = {"torch": "2.14.1", "torchrec": "1.9.2", "fbgemm-gpu": "0", "fbgemm-gpu-cpu": "1.9.0"}


def triple(versions: dict[str, str], cuda: bool = False) -> doctor.Finding:
    findings = doctor.check_triple(versions.get, cuda)
    assert len(findings) == 1
    return findings[0]


@pytest.mark.parametrize(
    ("versions", "cuda", "state"),
    [
        (CPU, False, "a tested set"),
        (NEWEST, False, "a tested set"),
        (NEWEST | {"fbgemm-gpu": "1.9.0", "fbgemm-gpu-cpu": None}, True, f"a set {doctor.RUN_ON['2.14']}"),
        (CUDA, True, f"a set {doctor.RUN_ON['2.13']}"),
        (
            {"torch": "2.11.0", "torchrec": "1.6.1", "fbgemm-gpu": "1.6.0"},
            True,
            f"a set {doctor.RUN_ON['2.11']}",
        ),
    ],
)
def test_known_sets_pass_and_say_what_has_run(versions: dict[str, str], cuda: bool, state: str) -> None:
    finding = triple(versions, cuda)
    assert finding.ok
    assert finding.text.endswith(state)


@pytest.mark.parametrize(
    "file", sorted((doctor.CHECKOUT / "requirements").glob("cuda*.txt")), ids=lambda f: f.name
)
def test_pages_say_of_a_cuda_set_what_doctor_says(file: Path) -> None:
    """The set's own first line, and the table in First run."""
    lines = file.read_text(encoding="utf-8").splitlines()
    torch = next(line for line in lines if line.startswith("torch==")).removeprefix("torch==")
    state = doctor.RUN_ON[doctor.minor(torch)]
    assert lines[0].endswith(f"{state}.")
    page = (doctor.CHECKOUT / "docs" / "first_run.md").read_text(encoding="utf-8")
    (row,) = (line for line in page.splitlines() if line.startswith(f"| CUDA | {doctor.minor(torch)} |"))
    assert row.endswith(f"| {state} |")


@pytest.mark.parametrize(
    ("change", "text", "file"),
    [
        ({"torchrec": "1.6.0"}, "torch 2.13 with torchrec 1.8 and fbgemm-gpu 1.8 is", "requirements/cpu.txt"),
        ({"torch": "2.12.1"}, "not a tested set", "requirements/cpu.txt"),
        ({"fbgemm-gpu-cpu": "1.7.0"}, "fbgemm-gpu-cpu 1.7.0: not a tested set", "requirements/cpu.txt"),
    ],
)
def test_untested_sets_name_the_nearest_tested_one(change: dict[str, str], text: str, file: str) -> None:
    finding = triple(CPU | change)
    assert text in finding.text
    assert finding.remedy.endswith(f"-m pip install -r {file}")


@pytest.mark.parametrize(("cuda", "file"), [(False, "cpu.txt"), (True, "cuda-torch2.11.txt")])
def test_what_is_proposed_is_what_setup_installs(cuda: bool, file: str) -> None:
    """The set that was run on GPUs, where there is one; also to who has a torch of no set."""
    assert doctor.install(cuda).endswith(f"requirements/{file}")
    assert f"requirements=requirements/{file}" in (doctor.CHECKOUT / "setup.sh").read_text(encoding="utf-8")
    versions = {"torch": "2.12.1", "torchrec": "1.7.0", "fbgemm-gpu": "1.7.0"}
    assert triple(versions, cuda).remedy.endswith(f"requirements/{file}")


def test_torch_2_11_is_mended_with_its_own_file() -> None:
    finding = triple({"torch": "2.11.0+cu130", "torchrec": "1.8.0", "fbgemm-gpu": "1.8.0"}, cuda=True)
    assert finding.remedy.endswith("requirements/cuda-torch2.11.txt")


def test_a_machine_without_a_driver_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """FBGEMM's CUDA build does not load there, and says only which of its own files does not."""
    failed = subprocess.CompletedProcess([], 1, "", "OSError: Could not load this library: fbgemm_gpu_py.so")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: failed)
    monkeypatch.setattr(doctor, "NVML", "libno-such-driver.so")
    finding = doctor.check_loads(cuda=True)
    assert "this machine has no NVIDIA driver (libno-such-driver.so is not found)" in finding.text
    assert "requirements/cpu.txt is the set for a machine without a GPU" in finding.text
    assert finding.remedy.endswith("-m pip install -r requirements/cpu.txt")
    installed = {"torch": "2.11.0", "torchrec": "1.6.1", "fbgemm-gpu": "1.6.0"}
    monkeypatch.setattr(doctor, "installed_version", installed.get)
    monkeypatch.setattr(doctor, "torch_is_cuda", lambda: True)
    monkeypatch.setattr(doctor, "fbgemm_owners", lambda: ["fbgemm-gpu"])
    monkeypatch.delenv(doctor.SKIP, raising=False)
    with pytest.raises(UserError, match="has no NVIDIA driver .*Mend it: install NVIDIA's driver; without"):
        doctor.check_versions()
    monkeypatch.setattr(doctor, "has_driver", lambda: True)  # then the set does not fit
    finding = doctor.check_loads(cuda=True)
    assert "fbgemm_gpu_py.so" in finding.text
    assert finding.remedy.endswith("-m pip install -r requirements/cuda-torch2.11.txt")
    doctor.check_versions()


@pytest.mark.parametrize(
    ("status", "out", "text", "remedy"),
    [
        (0, "kernels run on NVIDIA H100\n", "kernels run on NVIDIA H100", ""),
        (2, "the GPU cannot be used (busy): wait\n", "the GPU cannot be used (busy)", "wait"),
        (1, "", "RuntimeError", "no such kernel"),
    ],
)  # fmt: skip
def test_a_gpu_is_tried_out(
    monkeypatch: pytest.MonkeyPatch, status: int, out: str, text: str, remedy: str
) -> None:
    done = subprocess.CompletedProcess([], status, out, "Traceback:\nRuntimeError: no such kernel\n")
    monkeypatch.setattr(doctor.subprocess, "run", lambda *_, **__: done)
    assert doctor.check_gpu() == doctor.Finding("gpu", text, remedy)


def test_an_error_of_a_gpu_is_its_first_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> str:
        raise RuntimeError("CUDA error: no such kernel\nCompile with `TORCH_USE_CUDA_DSA`")

    monkeypatch.setattr(device, "tried_out", fails)
    with pytest.raises(SystemExit, match="2"):
        exec(doctor.GPU_PROBE, {})
    said = capsys.readouterr().out
    assert "kernels do not run on it (CUDA error: no such kernel): see whether nvidia-smi" in said
    assert "DSA" not in said


def test_outside_of_a_checkout_the_remedy_names_packages(tmp_path: Path) -> None:
    cpu, cuda = doctor.install(False, root=tmp_path), doctor.install(True, "2.11", root=tmp_path)
    assert "torch==2.13.* fbgemm-gpu-cpu==1.8.*" in cpu
    assert cpu.endswith("-m pip install --no-deps torchrec==1.8.*")
    assert cuda.endswith("torch==2.11.* fbgemm-gpu==1.6.* torchrec==1.6.*")


@pytest.mark.parametrize("name", ["torch", "torchrec"])
def test_missing_package_is_named(name: str) -> None:
    finding = triple({k: v for k, v in CPU.items() if k != name})
    assert finding.text == f"{name} is not installed"
    assert not finding.ok


def test_missing_fbgemm_is_named() -> None:
    assert triple({"torch": "2.13.0", "torchrec": "1.8.0"}).text == "fbgemm-gpu is not installed"


@pytest.mark.parametrize(
    ("owners", "cuda", "text"),
    [
        (["fbgemm-gpu", "fbgemm-gpu-cpu"], False, "both wrote fbgemm_gpu/"),
        (["fbgemm-gpu"], False, "CUDA build, but torch is a CPU build"),
        (["fbgemm-gpu-cpu"], True, "CPU build, but torch is a CUDA build"),
        ([], False, "no distribution holds fbgemm_gpu/"),
    ],
)
def test_fbgemm_clashes(owners: list[str], cuda: bool, text: str) -> None:
    [finding] = doctor.check_fbgemm(CPU.get, owners, cuda)
    assert text in finding.text
    assert "pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu && " in finding.remedy


def test_fbgemm_of_the_right_kind() -> None:
    assert doctor.check_fbgemm(CPU.get, ["fbgemm-gpu-cpu"], cuda=False)[0].ok


@pytest.mark.parametrize(
    ("torch_cuda", "owners", "driver", "for_gpu"),
    [
        (False, ["fbgemm-gpu-cpu"], False, False),
        (True, ["fbgemm-gpu"], False, True),
        (True, ["fbgemm-gpu-cpu"], False, False),
        (True, ["fbgemm-gpu-cpu"], True, True),
    ],
)
def test_torch_for_cuda_beside_fbgemm_for_the_cpu_is_a_set_for_the_cpu(
    monkeypatch: pytest.MonkeyPatch, torch_cuda: bool, owners: list[str], driver: bool, for_gpu: bool
) -> None:
    monkeypatch.setattr(doctor, "torch_is_cuda", lambda: torch_cuda)
    monkeypatch.setattr(doctor, "fbgemm_owners", lambda: owners)
    monkeypatch.setattr(doctor, "has_driver", lambda: driver)
    assert doctor.is_for_gpu() == for_gpu
    (finding,) = doctor.check_fbgemm(NEWEST.get, owners, doctor.is_for_gpu())
    assert finding.ok == (not driver)
    assert ("CUDA build, which runs on this machine's CPU" in finding.text) == (torch_cuda and not for_gpu)


def test_python_and_other_packages() -> None:
    assert "3.10.2 is too old" in doctor.check_python((3, 10, 2)).text
    assert doctor.check_python((3, 11, 0)).ok
    hydra, lightning = doctor.check_others({"hydra-core": "1.5.0"}.get)
    assert "outside 1.3.2 .. 1.5" in hydra.text
    assert lightning.text == "lightning is not installed"
    assert "pip install 'lightning>=2.5,<3'" in lightning.remedy


def test_a_run_refuses_an_untested_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", (CPU | {"torchrec": "1.6.0"}).get)
    monkeypatch.delenv(doctor.SKIP, raising=False)
    with pytest.raises(UserError, match="not a tested set.*Mend it: .*RECPIPE_SKIP_VERSION_CHECK=1"):
        doctor.check_versions()
    monkeypatch.setenv(doctor.SKIP, "1")
    doctor.check_versions()


def test_status_and_output(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = doctor.Finding("a", "a is fine"), doctor.Finding("b", "b is not", "mend-b")
    monkeypatch.setattr(doctor, "findings", lambda: [good, bad])
    assert doctor.print_findings() == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok    a is fine",
        "FAIL  b is not",
        "      mend it: mend-b",
    ]
    monkeypatch.setattr(doctor, "findings", lambda: [good])
    assert doctor.print_findings() == 0


@pytest.mark.soak  # every other test needs that it does
def test_this_installation_loads() -> None:
    assert doctor.check_loads(cuda=False).ok


def test_an_installation_older_than_its_files_is_named(tmp_path: Path) -> None:
    project = tmp_path / "pyproject.toml"
    assert doctor.missing_entry_points(project) == []
    project.write_text(
        '[project.entry-points."recpipe.tasks"]\nplan = "recpipe.tasks.plan:Plan"\nlook = "new:Look"\n'
    )
    assert doctor.missing_entry_points(project) == ["tasks: look"]
    assert doctor.missing_entry_points(doctor.CHECKOUT / "pyproject.toml") == []
