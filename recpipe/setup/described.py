"""The features of a run's files, stated in its recipe before anything starts: chosen for
``data.features=auto``, read from the yaml file that it names otherwise. Checkpoints and reports then say how
the files were read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from recpipe.checkpoint.manifest import TRAINER
from recpipe.checkpoint.table_io import load_trainer, naming, newest
from recpipe.checkpoint.trained_on import TrainedOn
from recpipe.common.console import log
from recpipe.common.saved import read_json
from recpipe.config.recipe import Recipe
from recpipe.data.config import AUTO, FilesConfig, RecordsConfig, StreamConfig
from recpipe.data.feature_yaml import parse_features, read_content
from recpipe.distributed.launch import ProcessRank
from recpipe.errors import UserError

FILE = "features.yaml"
"""In the run's directory: what was chosen."""


def with_features(recipe: Recipe, directory: Path | None) -> Recipe:
    """``recipe`` with the content of its features in the place of ``auto`` or a file's name. What was chosen
    is shown, and written into ``directory`` if there is one."""
    data = recipe.data
    if isinstance(data, StreamConfig) and isinstance(data.encoded_as, str):
        # The recipe keeps the name alone, for a vocabulary may be large.
        return replace(recipe, data=replace(data, encoded_as=_encoding(Path(data.encoded_as).expanduser())))
    if not isinstance(data, RecordsConfig) or not isinstance(data.features, str):
        return recipe
    if data.features != AUTO:
        content = _of_file(Path(data.features).expanduser())
    elif recipe.resume is not None:
        content = _as_trained(Path(recipe.resume).expanduser())
    else:
        assert isinstance(data, FilesConfig), "no other source takes auto"
        content = _chosen(data, directory)
    section = {**recipe.values["data"], "features": content, "label": None, "weight": None}
    return replace(
        recipe,
        data=replace(data, features=content, label=None, weight=None),
        values={**recipe.values, "data": section},
    )


def _encoding(place: Path) -> Any:
    """How the run of a checkpoint, or of a package's encoding.json, made samples of its data."""
    if place.is_file():
        try:
            return read_json(place)
        except (OSError, ValueError) as fault:
            raise UserError(f"data.encoded_as={place}: cannot be read ({fault})") from fault
    directory = newest(place)
    with naming(directory):
        preparation = TrainedOn.read(load_trainer(directory / TRAINER), directory).preparation
    content = None if preparation is None else preparation.to_dict()
    if content is None:
        raise UserError(
            f"data.encoded_as={place}: its data do not say how values became inputs; those of data=files do"
        )
    return content


def _of_file(file: Path) -> Any:
    content = read_content(file)
    parse_features(content, str(file))  # while the file's name can still be told
    return json.loads(json.dumps(content, default=str))


def _as_trained(resume: Path) -> Any:
    """The features of the run that is resumed, whatever the files would propose today."""
    directory = newest(resume)
    with naming(directory):
        trainer = load_trainer(directory / TRAINER)
    content = TrainedOn.read(trainer, directory).values["data"].get("features")
    if not isinstance(content, dict):
        raise UserError(
            f"data.features=auto: the run of resume={directory} had other keys for its columns; state these"
        )
    return content


def _chosen(data: FilesConfig, directory: Path | None) -> dict[str, Any]:
    # Only here, since other runs need neither pyarrow nor the terminal's tables before they train.
    from recpipe.data.proposal.propose import propose
    from recpipe.report.proposed import show_proposal

    log.info("choosing features: %s", data.path)
    proposal = propose(data)
    if ProcessRank.current().rank == 0:
        show_proposal(proposal)
    proposal.features()
    if ProcessRank.current().rank == 0 and directory is not None:
        proposal.write(directory / FILE)
        log.info("these features are in %s; state them in the next run, data.features=", directory / FILE)
    return proposal.content()
