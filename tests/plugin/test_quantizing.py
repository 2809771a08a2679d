"""Quantizers of several plugins: one owner of each aspect of each table and of each codec, faults named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from recpipe.plugin.api import Contribution
from recpipe.plugin.assembly import assemble
from recpipe.plugin.calls import Origin
from recpipe.plugin.compose import Quantizing
from recpipe.plugin.context import TableInfo
from recpipe.plugin.errors import PluginConflict, PluginError
from recpipe.plugin.quantizer import Coding, Quantizer, RecordLayout, RowCodec
from tests.plugin.samples import ACME, HOTLINE, TABLES, Good

INFOS = {name: replace(table, state=1) for name, table in TABLES.items()} | {"wide": TableInfo("wide", 9, 16)}


class Whole(RowCodec):
    """Keeps all bits."""

    def __init__(self, layout: RecordLayout) -> None:
        self.bytes_per_record = 4 * layout.width

    def encode(self, records: Any) -> Any:
        return records.view(np.uint8)

    def decode(self, encoded: Any, out: Any) -> None:
        out[...] = encoded.view(np.float32)


class Cold(Quantizer):
    def __init__(self, tables: str = "*", codec: Callable[[RecordLayout], Any] = Whole) -> None:
        self.tables, self.codec = tables, codec
        self.asked: list[RecordLayout] = []

    def cold(self, layout: RecordLayout) -> Any:
        self.asked.append(layout)
        return self.codec(layout)


class Stored(Quantizer):
    def __init__(self, **said: str) -> None:
        self.said = said

    def storage(self, table: TableInfo) -> str | None:
        return self.said.get(table.name)


class Sent(Quantizer):
    def codecs(self) -> Any:
        return {("rows", "forward"): self}


def merged(*quantizers: tuple[Origin, Quantizer]) -> Quantizing:
    return assemble([(o, Good(), Contribution(quantizer=q)) for o, q in quantizers], INFOS).quantizing


def test_each_aspect_has_its_own_owner() -> None:
    made = merged((ACME, Cold("t_*")), (HOTLINE, Stored(user_id="fp16", t_cat_0="fp32")))
    assert {table: owned.label for table, owned in made.cold.items()} == {
        "t_cat_0": "acme.Cold",
        "t_cat_1": "acme.Cold",
    }
    assert {table: owned.label for table, owned in made.storage.items()} == {
        "t_cat_0": "hotline.Stored",
        "user_id": "hotline.Stored",
    }
    assert made.storage["user_id"].part == "fp16"
    both = merged((ACME, Cold("t_*")), (HOTLINE, Cold("user_id")))
    assert both.cold["t_cat_0"].part is both.cold["t_cat_1"].part, "tables of one layout share a codec"
    assert both.cold["user_id"].part is not both.cold["t_cat_0"].part


def test_it_is_asked_once_for_each_layout() -> None:
    cold = Cold()
    merged((ACME, cold))
    assert cold.asked == [RecordLayout(8, 9), RecordLayout(16, 16)]


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        (
            Cold("t_*"),
            Cold("*_0"),
            "both want to decide the cold of table 't_cat_0': one .*plugins.hotline.tables",
        ),
        (Stored(wide="fp16"), Stored(wide="fp16"), "both want to decide the storage of table 'wide'"),
        (Sent(), Sent(), r"both bring the codec of \('rows', 'forward'\). Drop one"),
    ],
)
def test_two_owners_are_refused(first: Quantizer, second: Quantizer, said: str) -> None:
    with pytest.raises(PluginConflict, match=rf"acme \(.*\) and hotline \(.*\) {said}"):
        merged((ACME, first), (HOTLINE, second))


def test_what_is_answered_with_none_stays_free() -> None:
    made = merged((ACME, Cold(codec=lambda layout: None)), (HOTLINE, Cold()))
    assert {owned.origin for owned in made.cold.values()} == {HOTLINE}


@pytest.mark.parametrize(
    ("quantizer", "said"),
    [
        (
            Quantizer(),
            r"part acme.Quantizer, a quantizer, overrides none of cold\(\), storage\(\), codecs\(\); bring",
        ),
        (Cold("t_cat"), r"quantizes tables 't_cat', but the model has: .*plugins.acme.tables='\*'"),
        (Stored(wide="half"), r"storage\(\) stores table 'wide' in 'half'; choose one of fp32, fp16"),
        (Cold(codec=lambda layout: 3), r"cold\(\) must return a RowCodec or None, not int"),
        (Cold(codec=lambda layout: Whole(RecordLayout(0, 0))), "bytes_per_record must be a whole number"),
    ],
)
def test_a_quantizer_that_is_none_is_refused(quantizer: Quantizer, said: str) -> None:
    with pytest.raises(PluginError, match=f"acme .*{said}"):
        merged((ACME, quantizer))


def test_faults_name_the_plugin() -> None:
    def fails(layout: RecordLayout) -> RowCodec:
        raise ZeroDivisionError

    acme = r"acme \(recpipe-acme 2.3.0\), part acme.Cold.cold"
    with pytest.raises(PluginError, match=f"{acme}, raised ZeroDivisionError"):
        merged((ACME, Cold(codec=fails)))
    coding = Coding(merged((ACME, Cold())).cold["wide"])
    with pytest.raises(PluginError, match=f"{acme}.decode, raised ValueError: .*broadcast"):
        coding.decode(np.zeros((1, 2), np.float32), np.zeros((1, 9), np.float32))


def test_wrong_bytes_name_the_plugin() -> None:
    coding = Coding(merged((ACME, Cold())).cold["wide"])
    said = r"plugin acme .*: encode\(\) must return uint8 \(2, 64\), not uint8 \(2, 68\)"
    with pytest.raises(PluginError, match=said):
        coding.encoded(np.zeros((2, 17), np.float32))


def test_rounding_without_bytes_is_asked_of_the_codec_and_checked() -> None:
    class Rounds(Whole):
        def rounded(self, records: torch.Tensor) -> torch.Tensor:
            return records[:, :4] if len(records) > 1 else records + 1

    records = torch.zeros((1, 17))
    assert Coding(merged((ACME, Cold())).cold["wide"]).rounded_there(records) is None, "it only encodes"
    coding = Coding(merged((ACME, Cold(codec=Rounds))).cold["wide"])
    rounded = coding.rounded_there(records)
    assert rounded is not None
    assert torch.equal(rounded, records + 1)
    said = (
        r"plugin acme .*: rounded\(\) must return torch.float32 \(2, 17\) on cpu, not torch.float32 \(2, 4\)"
    )
    with pytest.raises(PluginError, match=said):
        coding.rounded_there(torch.zeros((2, 17)))
