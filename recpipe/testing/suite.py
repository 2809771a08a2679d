"""``PluginSuite``: tests of what the contract requires of any plugin."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, ClassVar, Never

import pytest

from recpipe.plugin.api import Contribution, Invariant, Plugin
from recpipe.plugin.assembly import assemble, gather
from recpipe.plugin.context import Context
from recpipe.plugin.errors import PluginError
from recpipe.plugin.load import activate, installed
from recpipe.tasks.plugins import SAMPLE, default_knobs, points
from recpipe.testing.apart import RunError, once, reference
from recpipe.testing.judgements import (
    REMEDY,
    idle,
    kept,
    layout_faults,
    model_faults,
    resumed_faults,
    traces,
    update_faults,
)
from recpipe.testing.purity import costs, deeds, outline
from recpipe.testing.runs import (
    ADAGRAD,
    MOMENTUM,
    SuiteRecipe,
    Trained,
    epoch_of,
    knobs_of,
    varied_words_of,
    words_of,
)
from recpipe.testing.samples import Epoch, faults

MEGABYTE = 1 << 20


class PluginSuite:
    """Subclass it and set ``plugin`` to the name of its entry point::

        class TestAcme(PluginSuite):
            plugin = "acme"
            knobs = {"window": 4}

    Each run is small, two epochs of 32 steps, and has a process of its own, in which no plugin has been
    imported before. One is under SGD, with skewed ids and tables of up to 6,000 rows, of which 30% may be
    resident; one is under Adagrad, with the tables of ``recpipe.testing.varied``. Every test's message names
    the plugin.
    """

    plugin: ClassVar[str] = ""
    knobs: ClassVar[Mapping[str, object]] = {}
    """Values of the plugin's own keys, if those of the yaml do not suit so small a run."""
    overrides: ClassVar[Sequence[str]] = ()
    """Words of the command line for every run, with the plugin and without. Those of ``data``, ``model``,
    ``optim`` and the length are the first run's alone."""
    ranks: ClassVar[int] = 2
    """The number of trainers for the test on several ranks; 1 skips it, with the reason in ``one_rank``."""
    one_rank: ClassVar[str] = ""
    """Why the plugin works on one rank alone."""
    beside: ClassVar[Sequence[str] | None] = None
    """Other plugins to train it with, one at a time; None: all that are installed and have a part in
    training."""
    pins: ClassVar[bool] = False
    """Whether rows stay resident for good once its cache has made them so."""
    replans: ClassVar[bool] = False
    """Whether a resumed run may move other rows, as a cache that looks ahead does. It must still end with the
    same parameters."""
    tolerance: ClassVar[float] = 1e-6
    """How far a parameter may be from its value without the plugin; float sums in another order need this
    much."""
    adagrad_tolerance: ClassVar[float] = 1e-5
    """The same for the run under Adagrad, which divides by sums of squares: with its ``eps`` of 1e-3 and a
    rate of 0.05 it can make a difference up to 50 times as large."""
    context: ClassVar[Context] = SAMPLE

    def make(self) -> Plugin:
        """A new plugin object with the values of its yaml, and ``knobs``."""
        return activate(self._knobs())[0][1]

    def _knobs(self) -> dict[str, dict[str, Any]]:
        return knobs_of(self._recipe())

    def _recipe(self, beside: str = "") -> SuiteRecipe:
        return SuiteRecipe(words_of(self.overrides), self.plugin, json.dumps(dict(self.knobs)), beside)

    def _varied(self, *dense: str) -> SuiteRecipe:
        words = varied_words_of(self.overrides, *dense)
        return SuiteRecipe(words, self.plugin, json.dumps(dict(self.knobs)))

    def _fail(self, what: str) -> Never:
        raise AssertionError(f"plugin '{self.plugin}': {what}")

    def _none_of(self, faults: Iterable[str], remedy: str) -> None:
        for fault in faults:
            self._fail(f"{fault}. {remedy}")

    # -- runs --------------------------------------------------------------------------------

    @pytest.fixture
    def baseline(self, tmp_path_factory: pytest.TempPathFactory) -> Trained:
        """The run without the plugin, with all rows resident; trained once per session for the same
        overrides."""
        return once(self._recipe().plain(), tmp_path_factory)

    @pytest.fixture
    def trained(self, tmp_path_factory: pytest.TempPathFactory) -> Trained:
        """The run with the plugin, in tiers. Tables that it leaves to the recipe are under LFU."""
        return self._run(self._recipe(), tmp_path_factory)

    @pytest.fixture
    def resumed(self, trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Trained]:
        """The step of the first checkpoint of ``trained``, and the run resumed from it."""
        steps = trained.record.steps
        step = next((step for step in trained.checkpoints if step < len(steps)), None)
        if step is None:
            self._fail("overrides leave no checkpoint before the run's last step: leave trainer.* out")
        return step, self._run(self._recipe(), tmp_path_factory, f"resume={trained.checkpoints[step]}")

    def _run(
        self, recipe: SuiteRecipe, folders: pytest.TempPathFactory, *more: str, world: int = 1
    ) -> Trained:
        try:
            return once(recipe, folders, *more, world=world)
        except RunError as fault:
            raise AssertionError(f"plugin '{self.plugin}': its run ended with {fault}") from fault

    @pytest.fixture
    def epoch(self) -> Epoch:
        """The training samples as the data module yields them."""
        return epoch_of(self._recipe().plain())

    # -- the package and its contribution ----------------------------------------------------

    def test_yaml_composes_into_its_own_node(self) -> None:
        if list(self._knobs()) != [self.plugin]:
            self._fail(f"conf/plugin/{self.plugin}.yaml lacks '# @package plugins.{self.plugin}'")
        if not isinstance(self.make(), Plugin):
            self._fail("its entry point is no recpipe.plugin.Plugin")

    def test_pickles(self) -> None:
        plugin = self.make()
        if type(pickle.loads(pickle.dumps(plugin))) is not type(plugin):
            self._fail("pickling makes something else of it")

    def test_contribute_is_pure(self) -> None:
        plugin = self.make()
        first, second = plugin.contribute(self.context), plugin.contribute(self.context)
        if not outline(first) == outline(second) == outline(self.make().contribute(self.context)):
            self._fail("contribute() gives other parts when it is called again")

    def test_contribute_leaves_the_machine_alone(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import recpipe.run  # noqa: F401  what importing it does is not the plugin's doing

        def read(first: int) -> Never:
            self._fail("contribute() reads data: read when a part is first called")

        monkeypatch.chdir(tmp_path)
        cache = tmp_path / "cache"
        context = dataclasses.replace(self.context, cache_dir=cache, batches=read, held_out=read)
        plugin = self.make()
        with deeds() as done:
            plugin.contribute(context)
        done += [f"wrote {path}" for path in tmp_path.rglob("*")]
        self._none_of(
            (f"contribute() {deed}" for deed in done), "Do so when a part is first called, or not at all"
        )

    def test_contribute_is_cheap(self) -> None:
        plugin = self.make()
        with costs() as cost:
            plugin.contribute(self.context)
        if cost.bytes >= MEGABYTE:
            self._fail("contribute() took more than 1 MB: build later, when a part is first called")
        if cost.threads:
            self._fail("contribute() started a thread: start work when a part is first called")

    @pytest.mark.parametrize("first", [True, False])
    def test_composes_or_conflicts_with_every_other(self, first: bool) -> None:
        mine = self._knobs()[self.plugin]
        for other, ep in installed().items():
            if other == self.plugin or not _works_alone(ep, self.context):
                continue
            pair = [(self.plugin, mine), (other, default_knobs(ep))]
            active = dict(pair if first else pair[::-1])
            try:
                assemble(gather(activate(active), self.context), self.context.tables)
            except PluginError as conflict:
                if self.plugin not in str(conflict):
                    raise

    # -- training ----------------------------------------------------------------------------

    def test_trains_the_samples_that_it_says(self, trained: Trained, epoch: Epoch) -> None:
        self._check_samples(trained, epoch)

    def test_trains_the_model_that_it_says(self, baseline: Trained, trained: Trained) -> None:
        alters = self.make().alters
        plain = reference(trained, baseline, self._recipe().plain(), first_alone=True)
        if Invariant.MODEL not in alters:
            self._none_of(model_faults(trained, plain), _undeclared(Invariant.MODEL))
        if Invariant.TABLE_LAYOUT not in alters:
            self._none_of(layout_faults(trained, baseline), _undeclared(Invariant.TABLE_LAYOUT))

    def test_reproduces_the_run_without_it(self, baseline: Trained, trained: Trained) -> None:
        self._check_updates(trained, baseline)

    def test_its_technique_takes_place(self, baseline: Trained, trained: Trained, epoch: Epoch) -> None:
        self._none_of(idle(self.plugin, self._parts(), trained, self.pins), f"So {REMEDY}")
        for invariant in kept(trained, baseline, epoch, self.make().alters):
            self._fail(f"it alters {invariant.name}, and the run kept it: {invariant.value}. So {REMEDY}")

    def test_resumes_as_if_it_had_never_stopped(self, trained: Trained, resumed: tuple[int, Trained]) -> None:
        step, rest = resumed
        found = resumed_faults(trained, rest, step, moves=not self.replans)
        self._none_of((f"resumed from step {step}, {fault}" for fault in found), "Save it there")

    def test_leaves_the_process_as_it_was(
        self, baseline: Trained, trained: Trained, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        self._check_traces(trained, baseline, self._recipe(), tmp_path_factory)

    def test_leaves_the_process_as_it_was_when_resumed(
        self,
        baseline: Trained,
        resumed: tuple[int, Trained],
        tmp_path_factory: pytest.TempPathFactory,
    ) -> None:
        step, rest = resumed
        self._check_traces(rest, baseline, self._recipe(), tmp_path_factory, after=step)

    def test_trains_other_tables_under_adagrad(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        recipe = self._varied(*ADAGRAD)
        try:
            mine = once(recipe, tmp_path_factory)
        except RunError as fault:
            if fault.refused:
                pytest.skip(f"it refuses weighted, MEAN and unpooled tables, or so large ones: {fault}")
            self._fail(f"its run of other tables ended with {fault}")
        self._check_all(mine, recipe, tmp_path_factory, tolerance=self.adagrad_tolerance)

    def test_trains_alike_on_several_ranks(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        if self.ranks == 1:
            if not self.one_rank:
                self._fail("ranks = 1 needs a reason: say in one_rank why it works on one rank alone")
            pytest.skip(f"on one rank alone: {self.one_rank}")
        # Tables of all kinds, and a dense optimizer with state; the first run for a plugin that refuses them.
        for recipe in (self._varied(*MOMENTUM, "trainer.max_epochs=1"), self._recipe()):
            try:
                mine = once(recipe, tmp_path_factory, world=self.ranks)
            except RunError as fault:
                if fault.refused and recipe.varied:
                    continue
                self._fail(f"on {self.ranks} ranks its run ended with {fault}")
            self._check_all(mine, recipe, tmp_path_factory, f"on {self.ranks} ranks ")
            return

    def test_trains_beside_each_other_plugin(self, tmp_path_factory: pytest.TempPathFactory) -> None:
        for other in self.beside if self.beside is not None else _partners(self.plugin, self.context):
            recipe = self._recipe(other)
            try:
                self._check_beside(other, recipe, tmp_path_factory)
            except AssertionError:
                if not self._fails_alone(other, recipe, tmp_path_factory):
                    raise

    def test_reports(self, trained: Trained) -> None:
        if self.plugin not in trained.report["plugins"]:
            self._fail("report.json does not name it")
        silent = {i.name for i in self.make().alters} - set(trained.report["altered"])
        if silent:
            self._fail(f"report.json does not say that it alters {', '.join(sorted(silent))}")
        if self._parts().report and not trained.report["plugins"][self.plugin]:
            self._fail("it has a reporter but no figures in report.json")

    # -- judgements --------------------------------------------------------------------------

    def _parts(self) -> Contribution:
        return self.make().contribute(self.context)

    def _check_all(
        self,
        mine: Trained,
        recipe: SuiteRecipe,
        folders: pytest.TempPathFactory,
        where: str = "",
        alters: frozenset[Invariant] | None = None,
        tolerance: float | None = None,
    ) -> None:
        """All that is judged of a run other than the first."""
        plain = once(recipe.plain(), folders)
        self._check_samples(mine, epoch_of(recipe.plain()), where, alters)
        self._check_updates(mine, plain, recipe, where, alters, tolerance)
        self._check_traces(mine, plain, recipe, folders, where)

    def _check_beside(self, other: str, recipe: SuiteRecipe, folders: pytest.TempPathFactory) -> None:
        try:
            mine = once(recipe, folders)
        except RunError as fault:
            if fault.refused and self.plugin in str(fault):
                return
            self._fail(f"beside plugin '{other}' its run ended with {fault}")
        alters = frozenset[Invariant]().union(*(p.alters for _, p in activate(knobs_of(recipe))))
        self._check_all(mine, recipe, folders, f"beside plugin '{other}' ", alters=alters)

    def _fails_alone(self, other: str, recipe: SuiteRecipe, folders: pytest.TempPathFactory) -> bool:
        """Whether what ``other`` does without this plugin would be found as well: it is its own author's
        concern."""
        alone = SuiteRecipe(recipe.words, other)
        alters = activate(knobs_of(alone))[0][1].alters
        try:
            self._check_all(once(alone, folders), alone, folders, alters=alters)
        except (RunError, AssertionError):
            return True
        return False

    def _check_samples(
        self, mine: Trained, epoch: Epoch, where: str = "", alters: frozenset[Invariant] | None = None
    ) -> None:
        if not mine.record.steps:
            self._fail("the run was not seen: overrides must not set trainer.callbacks")
        for invariant, fault in faults(mine.record, epoch, self.make().alters if alters is None else alters):
            self._fail(f"{where}{fault}. {_undeclared(invariant)}")

    def _check_updates(
        self,
        mine: Trained,
        baseline: Trained,
        recipe: SuiteRecipe | None = None,
        where: str = "",
        alters: frozenset[Invariant] | None = None,
        tolerance: float | None = None,
    ) -> None:
        loss = mine.report["quality"]["logloss"]
        if loss is None or not math.isfinite(loss):
            self._fail(f"{where}the run with the plugin diverged")
        # A run that trains the same samples must end with the same parameters, but for these.
        other = {Invariant.EXACT_GRADIENT, Invariant.MODEL, Invariant.TABLE_LAYOUT}
        if other & (self.make().alters if alters is None else alters):
            return
        plain = reference(mine, baseline, (recipe or self._recipe()).plain())
        self._none_of(
            (
                f"{where}{fault}"
                for fault in update_faults(mine, plain, self.tolerance if tolerance is None else tolerance)
            ),
            _undeclared(Invariant.EXACT_GRADIENT),
        )

    def _check_traces(
        self,
        mine: Trained,
        plain: Trained,
        recipe: SuiteRecipe,
        folders: pytest.TempPathFactory,
        where: str = "",
        after: int = 0,
    ) -> None:
        """``plain`` runs in tiers of core's where these leave traces of their own: in shards."""
        if mine.report["assembly"]["sharded"]:
            sharded = SuiteRecipe((*recipe.plain().words, "tiers.sharded=true"))
            plain = once(sharded, folders, world=mine.report["ranks"]["world"])
        elif mine.report["ranks"]["world"] > 1:
            plain = once(recipe.plain(), folders, world=mine.report["ranks"]["world"])
        found = (f"{where}{trace}" for trace in traces(mine, plain, after))
        self._none_of(found, "A run must leave its process as it found it, but for its own objects")


def _undeclared(invariant: Invariant) -> str:
    return f"That breaks '{invariant.value}': correct it, or declare Invariant.{invariant.name} in alters"


def _partners(plugin: str, context: Context) -> list[str]:
    """Installed plugins that have a part in training; one without if there are none."""
    others = [ep for name, ep in installed().items() if name != plugin and _works_alone(ep, context)]
    active = []
    for ep in others:
        [(_, other)] = activate({ep.name: default_knobs(ep)})
        if points(other.contribute(context)):
            active.append(ep.name)
    return active or [ep.name for ep in others[:1]]


def _works_alone(ep: EntryPoint, context: Context) -> bool:
    """Whether an installed plugin can be used at all; a broken one is its own author's concern."""
    try:
        assemble(gather(activate({ep.name: default_knobs(ep)}), context), context.tables)
    except Exception:
        return False
    return True
