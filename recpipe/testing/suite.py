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

from recpipe.plugin.api import Context, Contribution, Invariant, Plugin
from recpipe.plugin.assembly import assemble, gather
from recpipe.plugin.errors import PluginError
from recpipe.plugin.load import activate, installed
from recpipe.tasks.plugins import SAMPLE, default_knobs
from recpipe.testing.costs import sample_facts, wrong_costs
from recpipe.testing.purity import costs, deeds, outline
from recpipe.testing.ranks import train_ranks
from recpipe.testing.replay import reference
from recpipe.testing.resume import resumed_faults
from recpipe.testing.runs import SuiteRecipe, Trained, knobs_of, once, plan, words_of
from recpipe.testing.samples import Epoch, faults
from recpipe.testing.technique import REMEDY, idle, kept
from recpipe.testing.updates import LOSSES, comparable, furthest, layout_faults, model_faults

MEGABYTE = 1 << 20


class PluginSuite:
    """Subclass it and set ``plugin`` to the name of its entry point::

        class TestAcme(PluginSuite):
            plugin = "acme"
            knobs = {"window": 4}

    The runs are small: two epochs of 20 steps under SGD, tables of up to 6,000 rows of which 30% may be
    resident, skewed ids. Every test's message names the plugin.
    """

    plugin: ClassVar[str] = ""
    knobs: ClassVar[Mapping[str, object]] = {}
    """Values of the plugin's own keys, if those of the yaml do not suit so small a run."""
    overrides: ClassVar[Sequence[str]] = ()
    """Words of the command line for every run, with the plugin and without."""
    ranks: ClassVar[int] = 1
    """The number of trainers for the test on several ranks; 1 skips it."""
    pins: ClassVar[bool] = False
    """Whether rows stay resident for good once its cache has made them so."""
    replans: ClassVar[bool] = False
    """Whether a resumed run may move other rows, as a cache that looks ahead does. It must still end with the
    same parameters."""
    tolerance: ClassVar[float] = 1e-6
    """How far a parameter may be from its value without the plugin; float sums in another order need this
    much."""
    context: ClassVar[Context] = SAMPLE

    def make(self) -> Plugin:
        """A new plugin object with the values of its yaml, and ``knobs``."""
        return activate(self._knobs())[0][1]

    def _knobs(self) -> dict[str, dict[str, Any]]:
        return knobs_of(self._recipe())

    def _recipe(self) -> SuiteRecipe:
        return SuiteRecipe(words_of(self.overrides), self.plugin, json.dumps(dict(self.knobs)))

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
        return self._run(tmp_path_factory)

    @pytest.fixture
    def resumed(self, trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, Trained]:
        """The step of the first checkpoint of ``trained``, and the run resumed from it."""
        steps = trained.record.steps
        step = next((step for step in trained.checkpoints if step < len(steps)), None)
        if step is None:
            self._fail("overrides leave no checkpoint before the run's last step: leave trainer.* out")
        return step, self._run(tmp_path_factory, f"resume={trained.checkpoints[step]}")

    def _run(self, folders: pytest.TempPathFactory, *more: str) -> Trained:
        recipe = self._recipe()
        try:
            return once(recipe, folders, *plan(recipe, folders), *more)
        except Exception as fault:
            said = "; ".join([f"{type(fault).__name__}: {fault}", *getattr(fault, "__notes__", ())])
            raise AssertionError(f"plugin '{self.plugin}': its run ended with {said}") from fault

    @pytest.fixture
    def epoch(self) -> Epoch:
        """The training samples as the data module yields them."""
        return Epoch.of(self._recipe().plain().words)

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

    def test_states_costs_that_add_up(self) -> None:
        stated = self.make().costs(sample_facts())
        if stated is not None and stated != self.make().costs(sample_facts()):
            self._fail("costs() says something else when it is asked again")
        self._none_of(wrong_costs(stated), "Correct costs(), or leave it out")

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
        self._check_model(trained, baseline)

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

    def test_trains_alike_on_several_ranks(
        self, baseline: Trained, epoch: Epoch, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        if self.ranks == 1:
            pytest.skip("it claims one rank; set ranks to try it with more")
        recipe = self._recipe()
        more = plan(recipe, tmp_path_factory)
        trained = train_ranks(self.ranks, recipe, tmp_path_factory.mktemp("ranks"), *more)
        self._check_samples(trained, epoch)
        self._check_updates(trained, baseline)

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

    def _check_samples(self, trained: Trained, epoch: Epoch) -> None:
        if not trained.record.steps:
            self._fail("the run was not seen: overrides must not set trainer.callbacks")
        for invariant, fault in faults(trained.record, epoch, self.make().alters):
            self._fail(f"{fault}. {_undeclared(invariant)}")

    def _check_model(self, trained: Trained, baseline: Trained) -> None:
        alters = self.make().alters
        plain = reference(trained, baseline, self._recipe().plain(), first_alone=True)
        if Invariant.MODEL not in alters:
            self._none_of(model_faults(trained, plain), _undeclared(Invariant.MODEL))
        if Invariant.TABLE_LAYOUT not in alters:
            self._none_of(layout_faults(trained, baseline), _undeclared(Invariant.TABLE_LAYOUT))

    def _check_updates(self, trained: Trained, baseline: Trained) -> None:
        loss = trained.report["quality"]["logloss"]
        if loss is None or not math.isfinite(loss):
            self._fail("the run with the plugin diverged")
        if not comparable(self.make().alters):
            return
        plain = reference(trained, baseline, self._recipe().plain())
        apart = furthest(trained, plain, self.tolerance)
        if apart.most > self.tolerance:
            self._fail(
                f"after {len(trained.record.steps)} steps {apart.name} is up to {apart.most:.2g} from its "
                f"values without the plugin, on the same samples; {apart.values:,} of them are more than "
                f"{self.tolerance:g} apart. {_undeclared(Invariant.EXACT_GRADIENT)}"
            )
        expected = plain.report["quality"]["logloss"]
        if not abs(loss - expected) <= LOSSES:
            self._fail(
                f"the held-out logloss is {loss:.7g}, and {expected:.7g} of the same parameters without it"
            )


def _undeclared(invariant: Invariant) -> str:
    return f"That breaks '{invariant.value}': correct it, or declare Invariant.{invariant.name} in alters"


def _works_alone(ep: EntryPoint, context: Context) -> bool:
    """Whether an installed plugin can be used at all; a broken one is its own author's concern."""
    try:
        assemble(gather(activate({ep.name: default_knobs(ep)}), context), context.tables)
    except Exception:
        return False
    return True
