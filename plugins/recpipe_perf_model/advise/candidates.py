"""The recipes that ``task=advise`` judges: built-in policies, installed plugins, and pairs of them."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations

from recpipe.config.compose import active_plugins, compose
from recpipe.errors import UserError
from recpipe.plugin.api import Plugin
from recpipe.plugin.errors import PluginError
from recpipe.plugin.load import check_together, installed, instantiate
from recpipe.plugin.offers import origin_of
from recpipe_perf_model.facts.facts import Facts
from recpipe_perf_model.statement import Statement
from recpipe_perf_model.tiers.predict import costs_of, of_policy, over_ranks

CACHES = ("lru", "lfu")
PLAIN_TIERED = "nocache"
"""The plain recipe where not all rows fit: nothing is kept."""
RESIDENT = "resident"


@dataclass(frozen=True)
class Candidate:
    """A recipe to judge."""

    policy: str
    """``tiers.policy``."""
    base: Statement
    """The policy's own statement."""
    plugins: Mapping[str, Plugin] = field(default_factory=dict)
    stated: Mapping[str, Statement] = field(default_factory=dict)
    """By plugin."""
    sharded: bool = False
    """Whether TorchRec's own planner places the tables over the ranks."""

    @property
    def name(self) -> str:
        """The policy, if no plugin decides which rows are resident, and plugins."""
        return "+".join([*self._own_policy, *self.plugins, *(["sharded"] if self.sharded else [])])

    @property
    def shards(self) -> bool:
        """Whether tables are cut over the ranks, so that the memory of all of them holds different rows."""
        return any(statement.spread < 1 for statement in (self.base, *self.stated.values()))

    @property
    def alters(self) -> list[str]:
        """What the plugins change of the training, in words."""
        return sorted({fact.value for plugin in self.plugins.values() for fact in plugin.alters})

    @property
    def _own_policy(self) -> list[str]:
        """The policy, unless a plugin decides which rows are resident."""
        return [] if any(statement.phases for statement in self.stated.values()) else [self.policy]

    def row(self, budget: int, ranks: int) -> str:
        """As a row of ``compare.plugins``; ``budget``: bytes of each rank."""
        more = ["tiers.sharded=true"] if self.sharded else []
        if self.shards and self.policy != RESIDENT:
            more.append(f"tiers.resident_bytes={budget * ranks}")
        return ":".join(["+".join([*self._own_policy, *self.plugins]), *more])

    def command(self, own: Sequence[str], budget: int, ranks: int, apart: bool) -> str:
        """The line that runs it with the user's ``own`` overrides, on each machine if ranks are ``apart``;
        ``budget``: bytes of each rank."""
        policy, names = self._own_policy, list(self.plugins)
        added = [f"tiers.policy={each}" for each in policy]
        if names:
            added.append(f"+plugin={names[0]}" if len(names) == 1 else f"+plugin=[{','.join(names)}]")
        if self.sharded:
            added.append("tiers.sharded=true")
        if policy != [RESIDENT]:
            added.append(f"tiers.resident_bytes={budget * ranks if self.shards else budget}")
        keys = {word.partition("=")[0] for word in added}
        kept = [word for word in own if word.partition("=")[0] not in keys]
        here = ["--standalone", f"--nproc-per-node={ranks}"]
        there = [
            f"--nnodes={ranks}",
            "--nproc-per-node=1",
            "--rdzv-backend=c10d",
            "--rdzv-endpoint=HOST:29400",
        ]
        start = ["python"] if ranks == 1 else ["torchrun", *(there if apart else here)]
        return shlex.join([*start, "-m", "recpipe", *kept, *added])


def candidates(facts: Facts, left_out: dict[str, str]) -> Iterator[Candidate]:
    """All recipes for ``facts``; the plain one comes first. What cannot be judged is put into ``left_out``,
    with the reason."""
    if facts.trainers > 1:
        yield from _over_ranks(facts, left_out)
        return
    for policy in _policies(facts):
        yield Candidate(policy, of_policy(policy, facts))
    if facts.share >= 1:
        left_out["caches and plugins"] = "all rows fit, so that there is nothing to fetch"
        return
    plugins, stated = _stating(facts, left_out)
    for names in (*((name,) for name in plugins), *combinations(plugins, 2)):
        own, said = {name: plugins[name] for name in names}, {name: stated[name] for name in names}
        # Two caches of which neither yields do not go together, nor what plugins say of each other.
        owners = [name for name in names if said[name].phases]
        if sum(not said[name].yields for name in owners) > 1:
            continue
        try:
            check_together(own)
        except PluginError:
            continue
        for policy in (PLAIN_TIERED,) if owners else CACHES:
            yield Candidate(policy, of_policy(policy, facts), own, said)


def _over_ranks(facts: Facts, left_out: dict[str, str]) -> Iterator[Candidate]:
    """Replicas on every rank; shards by TorchRec's planner and by plugins; and plugins with tables of their
    own. Other plugins' techniques are not predicted over ranks."""
    whole = facts.at(share=min(1.0, facts.trainers * facts.share))
    for policy in _policies(facts):
        yield Candidate(policy, of_policy(policy, facts))
    for policy in _policies(whole)[-2:]:
        yield Candidate(policy, over_ranks(of_policy(policy, whole), whole), sharded=True)
    plugins, stated = _stating(facts, left_out)
    for name, statement in stated.items():
        own = {name: plugins[name]}, {name: statement}
        if statement.inside:
            yield Candidate(PLAIN_TIERED, of_policy(PLAIN_TIERED, facts), *own)
        elif statement.spread < 1:
            for policy in _policies(whole)[-2:]:
                yield Candidate(policy, of_policy(policy, whole), *own)
        else:
            left_out[name] = "what it costs over ranks is not predicted"


def _policies(facts: Facts) -> tuple[str, ...]:
    """The built-in policies at such a budget, the plain one first."""
    return (RESIDENT,) if facts.share >= 1 else (PLAIN_TIERED, *CACHES)


def _stating(facts: Facts, left_out: dict[str, str]) -> tuple[dict[str, Plugin], dict[str, Statement]]:
    """The installed plugins that state what they cost, as their yaml has them, and their statements."""
    plugins: dict[str, Plugin] = {}
    stated: dict[str, Statement] = {}
    for name, ep in installed().items():
        try:
            plugin = _as_installed(name)
            statement = costs_of(origin_of(ep), plugin, facts)
        except UserError as error:
            left_out[name] = str(error)
            continue
        if statement is None:
            left_out[name] = "it does not state what it costs here"
        elif replace(statement, why="", unsure="") == Statement(why=""):
            left_out[name] = statement.why
        else:
            plugins[name], stated[name] = plugin, statement
    return plugins, stated


@cache
def _as_installed(name: str) -> Plugin:
    """A plugin as its yaml has it."""
    return instantiate(name, active_plugins(compose([f"+plugin={name}"]))[name])
