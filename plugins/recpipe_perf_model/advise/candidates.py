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
from recpipe_perf_model.tiers.statements import costs_of, of_policy, over_ranks

CACHES = ("lru", "lfu")
PLAIN_TIERED = "nocache"
"""The plain recipe where not all rows fit: nothing is kept."""
RESIDENT = "resident"
OWN = ("task", "advise", "compare")
"""Sections of the command line that are the advice's own."""


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
        own = [] if self.plugins and self.owns_cache else [self.policy]
        return "+".join([*own, *self.plugins, *(["sharded"] if self.sharded else [])])

    @property
    def shards(self) -> bool:
        """Whether tables are cut over the ranks, so that the memory of all of them holds different rows."""
        return any(statement.spread < 1 for statement in (self.base, *self.stated.values()))

    def facts(self, facts: Facts) -> Facts:
        """``facts``, whose share of the rows is that of one rank's memory, with that of all which it has."""
        return facts.at(share=min(1.0, facts.trainers * facts.share)) if self.shards else facts

    def row(self, budget: int, ranks: int) -> str:
        """As a row of ``compare.plugins``; ``budget``: bytes of each rank."""
        own = [] if self.plugins and self.owns_cache else [self.policy]
        more = ["tiers.sharded=true"] if self.sharded else []
        if self.shards and self.policy != RESIDENT:
            more.append(f"tiers.resident_bytes={budget * ranks}")
        return ":".join(["+".join([*own, *self.plugins]), *more])

    @property
    def owns_cache(self) -> bool:
        """Whether one of the plugins decides which rows are resident."""
        return any(statement.phases for statement in self.stated.values())

    @property
    def alters(self) -> list[str]:
        """What the plugins change of the training, in words."""
        return sorted({fact.value for plugin in self.plugins.values() for fact in plugin.alters})

    def words(self, budget: int, ranks: int = 1) -> list[str]:
        """The overrides that make a recipe this one; ``budget``: bytes of each rank."""
        policy = [] if self.plugins and self.owns_cache else [f"tiers.policy={self.policy}"]
        names = list(self.plugins)
        one = f"+plugin={names[0]}" if len(names) == 1 else f"+plugin=[{','.join(names)}]"
        whole = budget * ranks if self.shards else budget
        memory = [] if self.policy == RESIDENT and not self.owns_cache else [f"tiers.resident_bytes={whole}"]
        placed = ["tiers.sharded=true"] if self.sharded else []
        return [*policy, *([one] if names else []), *placed, *memory]


def candidates(facts: Facts, left_out: dict[str, str]) -> Iterator[Candidate]:
    """All recipes for ``facts``; the plain one comes first. What cannot be judged is put into ``left_out``,
    with the reason."""
    if facts.trainers > 1:
        yield from _over_ranks(facts, left_out)
        return
    if facts.share >= 1:
        yield Candidate(RESIDENT, of_policy(RESIDENT, facts))
        left_out["caches and plugins"] = "all rows fit, so that there is nothing to fetch"
        return
    for policy in (PLAIN_TIERED, *CACHES):
        yield Candidate(policy, of_policy(policy, facts))
    plugins, stated = stating(facts, left_out)
    for names in (*((name,) for name in plugins), *combinations(plugins, 2)):
        yield from _with(names, plugins, stated, facts)


def _over_ranks(facts: Facts, left_out: dict[str, str]) -> Iterator[Candidate]:
    """Replicas on every rank; shards by TorchRec's planner and by plugins; and plugins with tables of their
    own. Other plugins' techniques are not predicted over ranks."""
    whole = facts.at(share=min(1.0, facts.trainers * facts.share))
    for policy in _policies(facts):
        yield Candidate(policy, of_policy(policy, facts))
    for policy in _policies(whole)[-2:]:
        yield Candidate(policy, over_ranks(of_policy(policy, whole), whole), sharded=True)
    plugins, stated = stating(facts, left_out)
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


def stating(facts: Facts, left_out: dict[str, str]) -> tuple[dict[str, Plugin], dict[str, Statement]]:
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


def _with(
    names: Sequence[str], plugins: Mapping[str, Plugin], stated: Mapping[str, Statement], facts: Facts
) -> Iterator[Candidate]:
    """The recipes with these plugins, none if they do not go together: two caches, of which neither yields,
    or what they say of each other."""
    own = {name: plugins[name] for name in names}
    said = {name: stated[name] for name in names}
    owners = [name for name in names if said[name].phases]
    if sum(not said[name].yields for name in owners) > 1:
        return
    try:
        check_together(own)
    except PluginError:
        return
    for policy in (PLAIN_TIERED,) if owners else CACHES:
        yield Candidate(policy, of_policy(policy, facts), own, said)


def carried(command_line: Sequence[str]) -> list[str]:
    """The user's own overrides, without those of the advice."""
    return [word for word in command_line if word.lstrip("+").partition("=")[0].partition(".")[0] not in OWN]


def command(
    own: Sequence[str], candidate: Candidate, budget: int, ranks: int = 1, apart: bool = False
) -> str:
    """The line that runs a candidate with the user's ``own`` overrides, on each machine if they are
    ``apart``."""
    added = candidate.words(budget, ranks)
    keys = {word.partition("=")[0] for word in added}
    kept = [word for word in own if word.partition("=")[0] not in keys]
    here = ["--standalone", f"--nproc-per-node={ranks}"]
    there = [f"--nnodes={ranks}", "--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-endpoint=HOST:29400"]
    start = ["python"] if ranks == 1 else ["torchrun", *(there if apart else here)]
    return shlex.join([*start, "-m", "recpipe", *kept, *added])
