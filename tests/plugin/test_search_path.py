"""A plugin's yaml is found without importing it, adds options, and cannot shadow the framework's."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from recpipe.config import compose as config
from recpipe.errors import UserError
from recpipe.plugin import conf
from recpipe.plugin.load import installed
from recpipe.tasks.compare_rows import parse_rows
from recpipe.tasks.plugins import listed
from tests.plugin.samples import write


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small conf of the framework's, instead of the real one."""
    conf = tmp_path / "framework"
    write(conf / "train.yaml", "defaults:\n  - data: core\n  - _self_\nplugins: {}\nseed: 1\n")
    write(conf / "data" / "core.yaml", "name: core\n")
    monkeypatch.setattr(config, "conf_dir", lambda: conf)
    return conf


def test_yaml_of_several_plugins_in_command_line_order(framework: Path, install) -> None:
    install("one")
    install("two")
    knobs = config.active_plugins(config.compose(["+plugin=[two,one]", "plugins.one.one_knob=5"]))
    assert list(knobs.items()) == [("two", {"two_knob": 1}), ("one", {"one_knob": 5})]
    assert not {"one_pkg", "two_pkg"} & sys.modules.keys()


def test_plugins_add_options_but_do_not_shadow(framework: Path, install) -> None:
    package = install("one")
    write(package / "conf" / "data" / "logs.yaml", "name: logs\n")
    write(package / "conf" / "data" / "core.yaml", "name: shadowed\n")
    assert config.compose(["data=logs"]).data.name == "logs"
    assert config.compose().data.name == "core"


def test_nearest_plugin(framework: Path, install) -> None:
    install("hotter")
    with pytest.raises(UserError, match=r"no plugin 'hoter'. Did you mean 'hotter'\? Installed: "):
        config.compose(["+plugin=hoter"])


def test_bare_plugin_key_is_refused(framework: Path) -> None:
    """No plugin brings a yaml, so Hydra takes +plugin=x for a plain value and nothing would be active."""
    with pytest.raises(UserError, match="no plugin"):
        config.compose(["+plugin=x"])
    write(framework / "train.yaml", "plugin: x\n")
    with pytest.raises(UserError, match="no yaml for plugin 'x', so no plugin would be active"):
        config.compose()


GREEDY = "# @package _global_\nseed: 2\ndata: {name: mine}\nplugins: {bad: {knob: 1}}\n"


@pytest.mark.parametrize(
    ("yaml", "keys"),
    [
        (GREEDY, "seed, data.name"),
        ("bad_knob: 1\n", "plugin.bad_knob"),
        ("# @package plugins\nbad: {knob: 1}\nother: {knob: 2}\n", "plugins.other.knob"),
        ("# @package plugins.other\nknob: 2\n", "plugins.other.knob"),
        ("# @package plugins.bad\ndefaults: [override /data: logs, _self_]\n", "defaults: {'override /data"),
        ("# @package plugins.bad\ndefaults: 3\nknob: 1\n", "defaults: 3"),
        ("# @package _global_\nhydra: {job: {chdir: true}}\n", "hydra.job.chdir"),
        ("# @package _global_\nplugins: 3\n", "plugins"),
        ("# @package _global_\n" + "".join(f"k{i}: 0\n" for i in range(7)), "k0, k1, k2, k3, k4 and 2 more"),
    ],
)
def test_yaml_that_sets_more_than_its_knobs_is_refused(framework, install, yaml, keys) -> None:
    package = install("bad", yaml)
    said = rf"plugin 'bad': {package}/conf/plugin/bad.yaml sets {re.escape(keys)}.*# @package plugins.bad'"
    with pytest.raises(UserError, match=said) as refused:
        config.compose(["+plugin=bad"])
    assert "\n" not in str(refused.value)


def test_such_yaml_is_refused_wherever_it_is_used_and_disturbs_nobody_else(framework, install) -> None:
    install("bad", GREEDY)
    install("good")
    write(framework / "experiment" / "both.yaml", "# @package _global_\ndefaults: [/plugin: [good, bad]]\n")
    good, bad, both = parse_rows(["good", "bad", "good+bad"], installed())
    for overrides in (["+plugin=[good,bad]"], ["+experiment=both"], bad.overrides(), both.overrides()):
        with pytest.raises(UserError, match="bad.yaml sets seed, data.name"):
            config.compose(overrides)
    recipe = config.compose(good.overrides())
    assert (recipe.seed, recipe.data.name, list(recipe.plugins)) == (1, "core", ["good"])
    assert {"good", "bad"} <= config.choices()["plugin"]
    assert "bad.yaml sets seed, data.name" in listed(installed()["bad"]).fault


@pytest.mark.parametrize(
    "yaml",
    [
        "# @package plugins.one\nknob: 1\n",
        "# @package plugins.one\ndefaults: [_self_]\nknob: 1\n",
        "# @package plugins\none: {knob: 1}\n",
        "# @package _global_\nplugins: {one: {knob: 1}}\n",
        "# @package _global_.plugins.one\nknob: 1\n",
    ],
)
def test_a_plugins_own_knobs_are_taken_however_they_are_addressed(framework, install, yaml) -> None:
    package = install("one", yaml)
    assert config.active_plugins(config.compose(["+plugin=one"])) == {"one": {"knob": 1}}
    assert conf.knobs_in(package / "conf", "one") == {"knob": 1}


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("# @package _global_\n{}\n", "sets nothing under plugins.one, so no plugin would be active"),
        ("# @package plugins.one\n[1, 2]\n", "must map knobs to values"),
        ("# @package _global_\nplugins: {one: 3}\n", "must map knobs to values"),
        ("# @package plugins.one and more\nknob: 1\n", "cannot be read: Too many components"),
        ("# @package plugins.one\nknob: [1,\n", "broken yaml: "),
    ],
)
def test_yaml_that_holds_no_knobs_is_refused(framework, install, yaml, message) -> None:
    package = install("one", yaml)
    with pytest.raises(UserError, match=re.escape(message)) as refused:
        config.compose(["+plugin=one"])
    assert f"{package}/conf/plugin/one.yaml" in str(refused.value)


def test_a_package_speaks_for_its_own_plugins_alone(framework, install) -> None:
    """``a`` comes first on the search path; its yaml for ``b`` is none of its business."""
    package = install("a")
    install("b")
    for name in ("b", "c"):
        write(package / "conf" / "plugin" / f"{name}.yaml", f"# @package plugins.{name}\nstolen: 1\n")
    assert config.active_plugins(config.compose(["+plugin=b"])) == {"b": {"b_knob": 1}}
    with pytest.raises(UserError, match="no plugin 'c'"):
        config.compose(["+plugin=c"])
    assert "c" not in config.choices()["plugin"]


def test_installed_plugin_without_yaml(framework: Path, install) -> None:
    install("other")
    (install("one") / "conf" / "plugin" / "one.yaml").unlink()
    with pytest.raises(UserError, match=r"plugin 'one' is installed but brings no conf/plugin/one.yaml"):
        config.compose(["+plugin=one"])


def test_plugins_must_be_a_mapping(framework: Path) -> None:
    with pytest.raises(UserError, match=r"plugins=3: must map plugin names to their knobs"):
        config.active_plugins(config.compose(["plugins=3"]))
    with pytest.raises(UserError, match=r"plugins.one=3: must map the plugin's knobs"):
        config.active_plugins(config.compose(["+plugins.one=3"]))
    with pytest.raises(UserError, match=r"Error merging override plugins=\[a\]: "):
        config.compose(["plugins=[a]"])


def test_broken_yaml_names_the_file(framework: Path) -> None:
    write(framework / "data" / "bad.yaml", "name: [1,\n")
    with pytest.raises(UserError, match=r"broken yaml: .*bad.yaml"):
        config.compose(["data=bad"])


def test_conf_is_found_in_this_checkout_or_wheel() -> None:
    assert (config.conf_dir() / "train.yaml").is_file()
