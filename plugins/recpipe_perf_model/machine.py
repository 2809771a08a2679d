"""What was measured on a machine: samples of its micro-benchmarks, in one JSON file for each machine.

Its form: ``schema`` (``SCHEMA``), ``host``, ``made`` (when it was begun), ``quick``, and ``samples``: for
each family of ``recpipe_perf_model.calibrate.FAMILIES`` a list of ``{"kind", "at", "seconds"}``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from recpipe.backend import choices
from recpipe.common.machine import Load, disturbance
from recpipe.common.own_cache import default_cache_dir, own_folder, require_own, write_own
from recpipe.common.saved import Damaged, entries, parse_json, typed_as
from recpipe.common.versions import FBGEMM, installed_version
from recpipe.errors import UserError
from recpipe.profiling.limits import Sample

SCHEMA = 2


@dataclass(frozen=True)
class Host:
    """The machine and the versions that measurements are valid for."""

    processor: str
    instruction_set: str
    """torch's vector instructions, then those that the environment allows oneDNN and MKL."""
    cores: int
    threads: int
    """The number of torch's threads."""
    device: str
    """``cpu``, or the name of the GPU."""
    torch_version: str
    fbgemm_version: str
    torchrec_version: str

    @classmethod
    def current(cls, device: torch.device | None = None) -> Host:
        """This process's host; ``device``: where models train, by default the CPU."""
        own = choices.Host.current()
        on_gpu = device is not None and device.type == "cuda"
        fbgemm = next(filter(None, map(installed_version, FBGEMM)), "none")
        return cls(
            own.processor,
            own.instruction_set,
            own.cores,
            torch.get_num_threads(),
            torch.cuda.get_device_name(device) if on_gpu else "cpu",
            torch.__version__,
            fbgemm,
            installed_version("torchrec") or "none",
        )

    def differs(self, other: Host) -> list[str]:
        """In what ``other`` differs from this host, in words: ``threads: 2 there, 4 here``, here being this
        one."""
        names = {field.name: field.name.replace("_", " ") for field in fields(self)}
        pairs = ((word, getattr(other, name), getattr(self, name)) for name, word in names.items())
        return [f"{word}: {there} there, {here} here" for word, there, here in pairs if there != here]


@dataclass(frozen=True)
class MachineProfile:
    """All samples of one machine."""

    host: Host
    made: str
    """When it was begun, as ISO 8601."""
    quick: bool
    """Whether some family was measured in the quick form."""
    samples: Mapping[str, tuple[Sample, ...]] = field(default_factory=dict)
    """By family."""
    disturbed: Mapping[str, str] = field(default_factory=dict)
    """The families that something disturbed while they were measured, and what. They serve this process and
    are not written to the file."""

    @classmethod
    def load(cls, path: Path, host: Host | None = None) -> MachineProfile:
        """Read a profile; ``UserError`` in one line if the file is missing, damaged, or of another machine
        than ``host``."""
        try:
            content = path.read_bytes()
        except OSError as fault:
            raise UserError(f"cannot read the machine profile {path}: {fault.strerror}") from fault
        try:
            found = parse_json(content)
            schema = entries({"schema": int}, found)["schema"]
            if schema != SCHEMA:
                raise Damaged(f"schema {schema}, not {SCHEMA}")
            profile = typed_as(cls, {key: value for key, value in found.items() if key != "schema"})
            for name, samples in profile.samples.items():
                bad = next((sample for sample in samples if sample.seconds <= 0), None)
                if bad is not None:
                    raise Damaged(f"samples.{name} has {bad.seconds} seconds for {bad.kind}")
        except ValueError as fault:
            raise UserError(
                f"{path}: no machine profile ({fault}); delete it, and 'recpipe perf calibrate' makes a new "
                "one"
            ) from fault
        differences = [] if host is None else host.differs(profile.host)
        if differences:
            raise UserError(
                f"{path} is the profile of another machine ({'; '.join(differences)}): delete it, and "
                "'recpipe perf calibrate' makes one of this machine"
            )
        return profile

    def joined(
        self, families: Mapping[str, Sequence[Sample]], at: Mapping[str, float | str]
    ) -> MachineProfile:
        """With ``families`` in place of samples of the same kinds that were measured ``at`` the same."""
        samples = dict(self.samples)
        for name, new in families.items():
            kinds = {sample.kind for sample in new}
            others = [
                sample
                for sample in samples.get(name, ())
                if sample.kind not in kinds
                or any(sample.at.get(key, value) != value for key, value in at.items())
            ]
            samples[name] = (*others, *new)
        return replace(self, samples=samples)

    def save(self, path: Path) -> None:
        """Write it atomically as JSON, a sample a line; ``UserError`` if that fails."""
        head = {"schema": SCHEMA, "host": asdict(self.host), "made": self.made, "quick": self.quick}
        families = []
        for name, samples in self.samples.items():
            if name not in self.disturbed:
                lines = ",\n   ".join(json.dumps(asdict(sample)) for sample in samples)
                families.append(f"  {json.dumps(name)}: [\n   {lines}\n  ]")
        body = ",\n".join(families)
        text = f'{json.dumps(head, indent=1)[:-2]},\n "samples": {{\n{body}\n }}\n}}\n'
        try:
            own_folder(path.parent)
            write_own(path, text)
        except OSError as fault:
            raise UserError(f"cannot write the machine profile {path}: {fault.strerror}") from fault


def profile_path(host: Host) -> Path:
    """Where the profile of ``host`` is kept; ``UserError`` if others can write there."""
    text = json.dumps([SCHEMA, asdict(host)], sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    folder = default_cache_dir() / "perf"
    require_own(folder)
    return folder / f"machine-{name}.json"


@dataclass(frozen=True)
class SharedProfile:
    """A machine's profile that measurements between ranks join, with its file."""

    file: Path
    profile: MachineProfile
    began: Load | None = field(default_factory=Load.now, compare=False)
    """The machine's load when it was read."""

    @classmethod
    def load(cls, file: Path) -> SharedProfile:
        """``UserError`` if it is missing or damaged, or others can write it."""
        require_own(file.parent)
        return cls(file, MachineProfile.load(file))

    @classmethod
    def of(cls, folder: Path, host: Host) -> SharedProfile:
        """That of ``host`` with any number of threads in ``folder``, since ranks have fewer than a run of one
        process; of several, the one with most families. An empty one if there is none."""
        found = []
        for file in sorted(folder.glob("machine-*.json")):
            own = cls.load(file)
            if not replace(own.profile.host, threads=host.threads).differs(host):
                found.append(own)
        made = datetime.now(UTC).isoformat(timespec="seconds")
        fresh = cls(folder / profile_path(host).name, MachineProfile(host, made, False))
        return max(found, key=lambda each: len(each.profile.samples), default=fresh)

    def joined(
        self,
        families: Mapping[str, Sequence[Sample]],
        at: Mapping[str, float | str],
        own_seconds: float | None = None,
    ) -> str:
        """Save it ``MachineProfile.joined`` by ``families``, unless other programs have used the machine
        since it was read; returns what disturbed it then, else an empty text.

        ``own_seconds``: the processor seconds that the ranks which measured have taken since; None: those of
        this process.
        """
        now = Load.now()
        if now is not None and self.began is not None and own_seconds is not None:
            now = replace(now, own=self.began.own + own_seconds)
        why = disturbance(None if now is None else now.others_since(self.began))
        if why:
            return why
        self.profile.joined(families, at).save(self.file)
        return ""


def own_profile(host: Host) -> MachineProfile | None:
    """The profile that ``recpipe perf calibrate`` has made for ``host``; None if there is none. ``UserError``
    for one of another machine in its place."""
    path = profile_path(host)
    return MachineProfile.load(path, host) if path.exists() else None
