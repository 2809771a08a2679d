"""A plugin's yaml is found without importing it, adds options, and cannot shadow the framework's."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from recpipe import config
from recpipe.errors import UserError


@pytest.fixture
def framework(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small conf of the framework's, instead of the real one."""
    conf = tmp_path / "framework"
    write(conf / "train.yaml", "defaults:\n  - data: core\n  - _self_\nplugins: {}\nseed: 1\n")
    write(conf / "data" / "core.yaml", "name: core\n")
    monkeypatch.setattr(config, "conf_dir", lambda: conf)
    return conf


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """``install(name, header)``: a distribution with a plugin whose module fails when imported."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def make(name: str, header: str | None = None) -> Path:
        package = site / f"{name}_pkg"
        write(package / "__init__.py", "raise RuntimeError('imported')\n")
        header = f"# @package plugins.{name}\n" if header is None else header
        write(package / "conf" / "plugin" / f"{name}.yaml", f"{header}{name}_knob: 1\n")
        info = site / f"{name}_pkg-1.0.dist-info"
        write(info / "METADATA", f"Metadata-Version: 2.1\nName: {name}_pkg\nVersion: 1.0\n")
        write(info / "entry_points.txt", f"[recpipe.plugins]\n{name} = {name}_pkg.plugin:P\n")
        importlib.invalidate_caches()
        return package

    return make


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


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


def test_yaml_without_its_header_is_refused(framework: Path, install) -> None:
    install("one", header="")
    with pytest.raises(UserError, match="the yaml that sets one_knob under 'plugin' lacks its first line"):
        config.compose(["+plugin=one"])


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
