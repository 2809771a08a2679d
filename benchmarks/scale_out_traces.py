"""``recpipe serve`` that says what each of its batches, or of a shard's answers, took.

    python scale_out_traces.py FILE serve ...

FILE gets a line of JSON for each when the server ends. Times are seconds of the machine's monotonic clock,
which all processes have alike. A main server's batch: ``n`` requests, ``begin``, ``ask`` (the first question
can leave), ``sent`` (the last one has), ``waits`` (nothing is left to do beside), ``came`` (the last answer
is there), ``end``, ``wrote`` (seconds in which questions and answers were made into messages, and back), and
of each shard its ``number``, when its question was ``sent``, when its answer was ``there``, and their bytes,
``asked`` and ``answered``. A shard's answer: ``begin``, ``end``, ``looked`` (seconds of the lookups), and how
many ``lookups``, ``ids`` and bytes of sums, ``answered``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

Line = dict[str, Any]


def main() -> int:
    """Serve."""
    file, words = Path(sys.argv[1]), sys.argv[2:]
    lines: list[Line] = []
    trace_main(lines)
    trace_shard(lines)
    from recpipe.cli import main as command

    sys.argv = ["recpipe", *words]
    try:
        command()
    except SystemExit as stop:
        return int(stop.code or 0)
    finally:
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return 0


def trace_main(lines: list[Line]) -> None:
    """A line for each batch."""
    import recpipe_scale_out.dense as dense
    from recpipe_scale_out.calls import ShardCalls
    from recpipe_serve.batching.batcher import Batcher

    scored, ask, send = Batcher._scored, ShardCalls.ask, ShardCalls._send
    own: Line = {}

    def traced_scored(self: Any, score: Any, asked: Any, *others: Any) -> Any:
        own.clear()
        own.update(n=len(asked), begin=perf_counter(), wrote=0.0, shards=[])
        found = scored(self, score, asked, *others)
        lines.append({**own, "end": perf_counter()})
        return found

    def traced_ask(self: Any, questions: Any, *others: Any) -> Any:
        own["ask"] = perf_counter()
        answers_of = ask(self, questions, *others)
        own["sent"] = perf_counter()

        def answers() -> Any:
            own["waits"] = perf_counter()
            found = answers_of()
            own["came"] = perf_counter()
            for shard in own.get("shards", []):
                answer = found[shard["number"]]
                shard["answered"] = 0 if isinstance(answer, str) else answer.ByteSize()
            return found

        return answers

    def traced_send(self: Any, shard: int, question: Any, *others: Any, **named: Any) -> None:
        line = {"number": shard, "asked": question.message.ByteSize()}
        own.setdefault("shards", []).append(line)
        send(self, shard, question, *others, **named)
        line["sent"] = perf_counter()
        next(reversed(question.calls)).add_done_callback(lambda _: line.update(there=perf_counter()))

    Batcher._scored = traced_scored  # type: ignore[method-assign]
    ShardCalls.ask, ShardCalls._send = traced_ask, traced_send  # type: ignore[method-assign]
    for name in ("write_request", "read_response"):
        setattr(dense, name, _timed(getattr(dense, name), own, "wrote"))


def trace_shard(lines: list[Line]) -> None:
    """A line for each answer."""
    from recpipe_scale_out.rows import Rows
    from recpipe_scale_out.serving import ShardModel

    pooled, count = Rows.pooled, ShardModel.count
    own: Line = {}

    def traced_pooled(self: Any, asked: Any, *others: Any) -> Any:
        began = perf_counter()
        found = pooled(self, asked, *others)
        own.update(
            looked=perf_counter() - began,
            lookups=len(asked.lookups),
            ids=len(asked.ids),
            answered=found.nbytes,
        )
        return found

    def traced_count(self: Any, status: int, seconds: float) -> None:
        now = perf_counter()
        lines.append({**own, "begin": now - seconds, "end": now})
        count(self, status, seconds)

    Rows.pooled, ShardModel.count = traced_pooled, traced_count  # type: ignore[method-assign]


def _timed(call: Callable[..., Any], own: Line, key: str) -> Callable[..., Any]:
    def timed(*words: Any, **named: Any) -> Any:
        began = perf_counter()
        try:
            return call(*words, **named)
        finally:
            own[key] = own.get(key, 0.0) + perf_counter() - began

    return timed


if __name__ == "__main__":
    sys.exit(main())
