"""Names of a comparison's rows where there is little room."""

from __future__ import annotations

import pytest

from recpipe.report import plots
from recpipe.report.remarks import labels

pytestmark = pytest.mark.usefixtures("real_plots")


@pytest.mark.parametrize(
    ("names", "lines"),
    [
        (["lru", "fae+slipstream"], ["lru", "fae+slipstream"]),
        (
            ["bagpipe:plugins.bagpipe.lookahead=20:tiers.prefetch=false", "bagpipe:lookahead=1"],
            ["bagpipe (lookahead=20, prefetch=false)", "bagpipe (lookahead=1)"],
        ),
        # An end that another key has, too, would not tell which is meant.
        (
            ["hotline:split=1:+trainer.split=never", "lru:data.seed=1", "lfu:seed=2"],
            ["hotline (split=1, trainer.split=never)", "lru (data.seed=1)", "lfu (seed=2)"],
        ),
        # A knob of one of several plugins keeps its plugin's name where it has to.
        (["a+b:plugins.a.size=1:plugins.b.size=2"], ["a+b (a.size=1, b.size=2)"]),
        # lru with the memory of another row.
        (["lru@bagpipe:plugins.bagpipe.lookahead=20"], ["lru@bagpipe (lookahead=20)"]),
        (["lru:optim.name=a=b"], ["lru (name=a=b)"]),
    ],
)
def test_keys_are_as_short_as_they_can_be(names: list[str], lines: list[str]) -> None:
    assert [label.line for label in labels(names)] == lines


def test_lines_of_a_name_beside_a_bar_are_narrow_and_whole() -> None:
    name = "hotline:trainer.split=never:tiers.prefetch=false:tiers.resident_bytes=25%"
    shown = labels([name], ["~*"])[0].wrapped(28)
    assert shown == "hotline~*\nsplit=never, prefetch=false,\nresident_bytes=25%"
    drawn = plots.bars("Speed", [shown, "lru"], [1.0, 2.0], "samples/s").svg
    low = plots.bars("Speed", ["hotline", "lru"], [1.0, 2.0], "samples/s").svg
    assert _height(drawn) > _height(low) + 2 * 2 * 10, "room for two more lines of 10 points beside each bar"


def _height(svg: str) -> float:
    return float(svg.split('height="')[1].split("pt")[0])


def test_losses_are_on_a_log_axis_where_the_first_ones_hide_the_others() -> None:
    assert plots.loss_axis("nats", [[33.0, 0.5, 0.46], [30.0, 0.5, None, 0.45]]).log
    assert not plots.loss_axis("nats", [[0.7, 0.5, 0.46]]).log
    assert not plots.loss_axis("nats", [[-3.0, 0.5, 33.0], []]).log
    drawn = plots.curves("Loss", {"a": ([1, 2, 3], [33.0, 0.5, 0.46])}, plots.Axis(), plots.Axis(log=True))
    assert all(f">{tick}</text>" in drawn.svg for tick in ("0.5", "5", "20"))
