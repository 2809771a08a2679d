"""The rows of a comparison: the meaning of their names, and the command lines of their runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from recpipe.errors import UserError, did_you_mean, shown
from recpipe.report.compared import RowResult
from recpipe.report.remarks import parted

POLICIES = ("resident", "nocache", "lru", "lfu")
"""The built-in cache policies that a row can name (``tiers.policy``)."""
CACHES = ("lru", "lfu")
"""The policies that keep rows as long as the budget allows."""
ALIKE = 1.05
"""Memories that differ by less are equal."""


@dataclass
class Row:
    """One recipe of the comparison: at most one built-in policy and any number of plugins; and its runs."""

    name: str
    policy: str | None
    plugins: tuple[str, ...]
    resident_bytes: int | None = None
    """Its budget, where it is not that of the other rows."""
    settings: tuple[str, ...] = ()
    """Overrides of this row alone."""
    result: RowResult = field(init=False, compare=False)

    def __post_init__(self) -> None:
        self.result = RowResult(self.name)

    def overrides(self) -> list[str]:
        """The overrides that this row adds to the user's own."""
        policy = [f"tiers.policy={self.policy}"] if self.policy else []
        policy += [f"tiers.resident_bytes={self.resident_bytes}"] if self.resident_bytes else []
        plugins = [f"+plugin=[{','.join(self.plugins)}]"] if self.plugins else []
        return [*policy, *plugins, *self.settings]


def parse_rows(names: Sequence[str], installed: Collection[str], key: str = "compare.plugins") -> list[Row]:
    """The rows of ``key`` in the given order. A name given twice is run twice, which shows the noise.

    ``a+b:key=value:key=value`` is policies and plugins with settings of that row alone. A key without a dot
    is a knob of the row's one plugin.

    Raises UserError for a name that is neither a policy nor in ``installed``, for two policies in a row, and
    for what is no setting.
    """
    rows = []
    for name in names:
        recipe, settings = parted(name)
        parts = recipe.split("+")
        for part in parts:
            if part not in POLICIES and part not in installed:
                known = [*POLICIES, *sorted(set(installed))]
                where = "" if part == name else f" in row '{shown(name)}'"
                hint = did_you_mean(part, known)
                raise UserError(f"{key}: unknown '{shown(part)}'{where}.{hint} Known: {', '.join(known)}")
        policies = [part for part in parts if part in POLICIES]
        if len(policies) > 1:
            raise UserError(f"{key}: row '{name}' names {len(policies)} policies; a table has one, keep one")
        plugins = tuple(part for part in parts if part not in POLICIES)
        own = tuple(_setting(text, name, plugins, key) for text in settings)
        rows.append(Row(name, policies[0] if policies else None, plugins, settings=own))
    return rows


def _setting(text: str, row: str, plugins: tuple[str, ...], rows: str) -> str:
    """A ``text`` of a ``row`` of the key ``rows`` as an override."""
    key, equals, _ = text.partition("=")
    if not equals or not key.strip("+~"):
        raise UserError(f"{rows}: '{shown(text)}' in row '{shown(row)}' is no key=value")
    if "." in key:
        return text
    if len(plugins) != 1:
        raise UserError(
            f"{rows}: row '{shown(row)}' names {len(plugins)} plugins, and '{key}' may be a knob of "
            f"any: write plugins.NAME.{text}"
        )
    return f"plugins.{plugins[0]}.{text}"


@dataclass(frozen=True)
class EqualMemory:
    """A policy once more, with a budget at which it takes as much memory as a technique."""

    row: Row
    policy: Row
    taken: int
    """What the policy takes at the budget of the other rows, in bytes."""
    budget: int
    """The resident rows of these bytes."""
    target: int
    """What the technique takes."""

    def corrected(self) -> Row | None:
        """The row with a better budget, if its run at this one missed the target; None if it did not.

        What a policy keeps beside its rows grows with their number, by how much two runs tell.
        """
        more, gained = self.row.resident_bytes, (self.row.result.memory_bytes or 0) - self.taken
        assert more is not None
        if gained <= 0 or abs(self.taken + gained - self.target) <= (ALIKE - 1) * self.target:
            return None
        budget = self.budget + (more - self.budget) * (self.target - self.taken) // gained
        return replace(self.row, resident_bytes=budget)


def at_equal_memory(rows: Sequence[Row]) -> list[EqualMemory]:
    """Cache policies among ``rows``, each once more for every technique that takes more memory than it.

    The budget is larger by what the technique takes more: resident rows, buffers, replicas and maps together,
    as the first run of each has measured them.
    """
    found: list[EqualMemory] = []
    measured = [
        (row, row.result.report["memory"], row.result.memory_bytes) for row in rows if row.result.runs
    ]
    for policy, memory, taken in measured:
        if policy.policy not in CACHES or policy.plugins or policy.settings:
            continue
        budgets: list[int] = []
        for technique, _, more in measured:
            if not technique.plugins or more is None or taken is None or more <= ALIKE * taken:
                continue
            budget = memory["resident_bytes"] + more - taken
            if all(max(budget, b) > ALIKE * min(budget, b) for b in budgets):
                budgets.append(budget)
                row = Row(f"{policy.name}@{technique.name}", policy.policy, (), budget)
                found.append(EqualMemory(row, policy, taken, memory["resident_bytes"], more))
    return found


def chosen_config(hydra: Any) -> list[str]:
    """The config directories and name of a ``hydra`` section as arguments, if the user chose them."""
    sources = {source.provider: source.path for source in hydra.runtime.config_sources}
    chosen = [f"--config-dir={sources['command-line']}"] if "command-line" in sources else []
    if "recpipe" in sources:  # recpipe's own, because the user's replaces it
        chosen.append(f"--config-path={sources['main']}")
    if hydra.job.config_name not in (None, "train"):
        chosen.append(f"--config-name={hydra.job.config_name}")
    return chosen


def carried_overrides(
    overrides: Sequence[str], rows: Sequence[Row], task: str = "compare", section: str = "compare"
) -> dict[str, list[str]]:
    """The user's overrides for each row's runs, by row name, in the given order.

    ``task``, ``compare``, ``advise`` keys and those of ``section`` are this ``task``'s own. A knob
    ``plugins.<name>.<knob>`` goes to the rows with that plugin only: for other rows the key does not exist.
    Overrides are passed on unchanged, since no shell is involved. Only the ``+`` of a knob, which is needed
    here because no plugin is composed, is removed.
    """
    carried: dict[str, list[str]] = {row.name: [] for row in rows}
    for text in overrides:
        plugin, kept = None, text
        if not text.startswith("--"):
            override = OverridesParser.create().parse_override(text)
            own, _, knob = override.key_or_group.partition(".")
            if own in ("task", "compare", "advise", section):
                continue
            if override.key_or_group == "plugin":
                raise UserError(
                    f"task={task} takes its plugins from {section}.plugins; leave '{text}' out and name them "
                    "there"
                )
            if own == "plugins" and knob:
                plugin = knob.partition(".")[0]
                if not any(plugin in row.plugins for row in rows):
                    raise UserError(
                        f"'{text}' sets a knob of plugin '{plugin}', which no row of {section}.plugins names"
                    )
                if override.is_add() and not override.is_force_add():
                    kept = text.removeprefix("+")
        for row in {row.name: row for row in rows}.values():
            if plugin is None or plugin in row.plugins:
                carried[row.name].append(kept)
    return carried
