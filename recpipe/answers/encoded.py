"""A package's encoding.json: how raw values become the inputs of its model, as they did in training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from recpipe.answers import score
from recpipe.common.saved import read_json
from recpipe.data.preparation import Preparation
from recpipe.errors import UserError

KEY = "encoding"
"""Of the manifest, which has the file's name there."""
FILE = "encoding.json"


def write_encoding(folder: Path, preparation: Preparation | None) -> dict[str, Any]:
    """Write the file into a package's ``folder`` if the data say how they are encoded; what the manifest says
    of it."""
    content = None if preparation is None else preparation.to_dict()
    if content is None:
        return {}
    (folder / FILE).write_text(json.dumps(content, ensure_ascii=False, allow_nan=False), encoding="utf-8")
    return {KEY: FILE}


def read_encoding(directory: Path, manifest: Mapping[str, Any]) -> Preparation | None:
    """How raw values become the inputs of the package ``directory``; None if it does not say.
    ``PackageError`` if what it says cannot be."""
    if KEY not in manifest:
        return None
    file = score.member(directory, dict(manifest), manifest[KEY])
    try:
        found = Preparation.read(read_json(file))
        if found.features is None or (found.learned is None and found.features.is_learned):
            raise ValueError("it lacks what was learned")
        sizes = found.learned and found.learned.sizes
        schema = found.features.schema(sizes or {})
    except (OSError, ValueError, UserError) as fault:
        raise score.PackageError(f"{file} cannot be used ({fault}): package the checkpoint anew") from fault
    told = [(feature["name"], feature["rows"]) for feature in manifest["sparse"]]
    if ([*schema.dense], [(f.name, f.rows) for f in schema.sparse]) != (manifest["dense"]["names"], told):
        raise score.PackageError(
            f"{file} is of other inputs than {score.MANIFEST}: package the checkpoint anew"
        )
    return found
