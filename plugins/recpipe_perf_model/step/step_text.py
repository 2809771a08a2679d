"""A captured step as text, to be kept in a machine's profile, and back."""

from __future__ import annotations

import json
from dataclasses import asdict

from recpipe.common.saved import parse_json, typed_as
from recpipe_perf_model.step.step import Step


def step_text(step: Step) -> str:
    """``step`` as JSON."""
    return json.dumps(asdict(step), separators=(",", ":"))


def parse_step(text: str) -> Step:
    """The step of such a text; ``Damaged`` if it is none."""
    return typed_as(Step, parse_json(text))
