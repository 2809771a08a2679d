"""A schema for files that nobody has described: proposed from a sample, with a reason for each line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml

from recpipe.data.config import FilesConfig
from recpipe.data.derived import derived_files
from recpipe.data.expression_values import require_types, values_of
from recpipe.data.feature_yaml import parse_features
from recpipe.data.features import Features, Label
from recpipe.data.files import RowChecks
from recpipe.data.proposal.choose import Choice, choose, found_labels, require_name
from recpipe.data.proposal.column import Column
from recpipe.data.proposal.derived import derived_sample
from recpipe.data.proposal.histories import with_histories
from recpipe.data.proposal.sample import Sample
from recpipe.data.records import InputFile
from recpipe.data.sessions import HISTORY, LAST, POSITIVE
from recpipe.errors import DataError, UserError, printable, shown

ROWS = 100_000
"""Rows of a sample."""


@dataclass(frozen=True)
class Proposal:
    """What is proposed for files of which ``sample`` was read. ``found``: a line if the label was found by
    its name; without any label, there is nothing to train."""

    sample: Sample
    choices: Sequence[Choice]
    found: str = ""
    weight: str | None = None
    """The column of samples' weights, if the user has named one."""

    @property
    def suspicions(self) -> list[str]:
        """What the user should look at, a line each."""
        alike: dict[str, list[str]] = {}
        for choice in self.choices:
            for word in choice.suspicions:
                alike.setdefault(word, []).append(shown(choice.column.name))
        noted = [f"{', '.join(names)}: {word}" for word, names in alike.items()]
        lacking = [
            f"{shown(name)}: left out, for {file} has no such column"
            for name, file in self.sample.lacking.items()
        ]
        left_out = self.sample.left_out
        apart = f"{left_out:,} events have no session or no time: data.on_bad_row=skip leaves these out"
        return noted + lacking + [apart] * bool(left_out)

    def content(self) -> dict[str, Any]:
        """What ``data.features`` takes: plain values."""
        labels, features = ([dict(c.entry) for c in self._of(role)] for role in ("label", "feature"))
        unread = [choice.column.name for choice in self._of("unread")]
        weight = {} if self.weight is None else {"weight": self.weight}
        return {"labels": labels, **weight, "features": features, "unread": [*unread, *self.sample.lacking]}

    def _of(self, role: str) -> list[Choice]:
        return [choice for choice in self.choices if choice.role == role]

    def features(self) -> Features:
        """The same, typed; ``UserError`` where there is nothing to learn, or nothing to learn it from."""
        if not self._of("label"):
            names = ", ".join(shown(choice.column.name) for choice in self.choices[:20])
            raise UserError(f"no column has a name of a label ({names}): say which, label=COLUMN")
        features = parse_features(self.content())
        if not features.sparse:
            raise DataError(
                "no column is a feature with ids, and a model needs one: write data.features by hand"
            )
        return features

    def to_yaml(self, told: Sequence[str] = ()) -> str:
        """The content as yaml, with the reason beside each line; the lines ``told`` come first."""
        lines = [f"# {printable(line)}" for line in told]
        for key, role in (("labels", "label"), ("features", "feature")):
            entries = [(_flow(dict(choice.entry)), choice) for choice in self._of(role)]
            width = min(100, max((len(text) for text, _ in entries), default=0))
            if key == "features" and self.weight is not None:
                lines.append(f"weight: {_flow(self.weight)}  # how much each sample counts")
            lines.append(f"{key}:" if entries else f"{key}: []")
            for text, choice in entries:
                lines.append(f"  - {text:<{width}}  # {printable(choice.reason)}")
                if role == "feature":
                    lines += [f"    # {printable(word)}" for word in choice.suspicions]
        unread = [(choice.column.name, choice.reason) for choice in self._of("unread")]
        unread += [(name, f"{file} has no such column") for name, file in self.sample.lacking.items()]
        lines += ["unread:  # columns that are left out"] if unread else []
        lines += [f"  - {_flow(name)}  # {printable(reason)}" for name, reason in unread]
        return "\n".join(lines) + "\n"

    def write(self, output: Path, told: Sequence[str] = ()) -> None:
        """Write the yaml; ``UserError`` where that cannot be."""
        try:
            output.write_text(self.to_yaml([f"Proposed from {self.sample.says}.", *told]), encoding="utf-8")
        except OSError as fault:
            raise UserError(f"{output}: cannot be written ({fault.strerror})") from fault


def propose(config: FilesConfig, rows: int = ROWS) -> Proposal:
    """A proposal for the files of ``config``, whose own features do not count but for its ``label``, which is
    found by name if it has none, and its ``weight``, from about ``rows`` rows. A column that says which rows
    validate and test is no feature, nor one of which a label is made.

    ``DataError`` for files that cannot be read.
    """
    (files,), weight, split, rule = derived_files(config), config.weight, config.rows_split, config.grouped
    sample = derived_sample(files, rows)
    scale, by = sample.total / sample.rows.num_rows, None if rule is None else rule.by
    columns = [
        Column(name, sample.rows[name].combine_chunks(), scale, whole=name == by)
        for name in sample.rows.column_names
    ]
    of_labels = [("label", name) for label in config.labels for name in label.columns]
    for key, name in [*of_labels, *([("weight", weight)] if weight else [])]:
        if name in sample.lacking:
            raise DataError(f"{key}={shown(name)}: {sample.lacking[name]} has no such column")
        require_name(columns, key, name)
    apart = [weight, split.column if split is not None and split.by == "column" else None]
    made = [_made(label, sample, files[0]) for label in config.labels if label.parsed is not None]
    columns = made + [column for column in columns if column.name not in apart]
    expressions = {label.name: label.parsed for label in config.labels}
    names = [] if rule is None else [*_added(sample.rows.column_names)]
    added = [column for column in columns if column.name in names and column.name not in expressions]
    columns = [column for column in columns if column not in added]
    named, found = found_labels(columns, list(expressions))
    if rule is not None and not named:
        named, found = [POSITIVE], "no column has a name of a label: that events took place is learned"
    choices = choose(columns, {name: expressions.get(name) for name in named})
    if rule is not None:
        choices = with_histories(choices, added, rule, config.negatives is not None)
    return Proposal(sample, choices, found, weight)


def _added(names: Sequence[str]) -> Iterator[str]:
    """Those of the columns of sessions that events do not have, but for ``POSITIVE``."""
    for name in names:
        if name == LAST or (name.endswith(HISTORY) and name.removesuffix(HISTORY) in names):
            yield name


def _made(label: Label, sample: Sample, file: InputFile) -> Column:
    """The label that an expression makes of columns; null where they cannot be read."""
    assert label.parsed is not None
    if label.name in sample.rows.column_names:
        raise UserError(f"label={shown(label.name)}: a column has this name; give the label another one")
    require_types(label.parsed, {field.name: (field.type, file) for field in sample.rows.schema})
    (rows,) = sample.rows.select(label.parsed.columns).combine_chunks().to_batches()
    checks = RowChecks(str(file), 1, len(rows))
    values = values_of(label.parsed, rows, label.missing, checks)
    known = checks.good & values.valid & ~values.missing
    if not known.any():
        raise DataError(
            f"label={shown(label.name)}: {shown(label.parsed.text)} has no value in any row of the sample: "
            "its columns are missing, or hold something else"
        )
    return Column(label.name, pa.array(values.values, mask=~known), sample.total / len(rows))


def _flow(value: Any) -> str:
    """A value on one line of yaml."""
    text: str = yaml.safe_dump(
        value, default_flow_style=True, sort_keys=False, allow_unicode=True, width=1 << 20
    )
    return text.removesuffix("...\n").strip()
