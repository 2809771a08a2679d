"""A plugin that leaves its code at one place in one way; ``test_ways_out`` installs it."""

import sys
import threading
from contextlib import contextmanager

import lightning as L
import numpy as np

from recpipe.plugin import (
    NOTHING,
    Cache,
    CachePolicy,
    Contribution,
    EpochOrder,
    Invariant,
    Link,
    Plugin,
    Quantizer,
    RowCodec,
    Skipper,
    Splitter,
    UserError,
)

WAYS = {
    "StopIteration": lambda: next(iter(())),
    "SystemExit": lambda: sys.exit(0),
    "GeneratorExit": lambda: raised(GeneratorExit()),
    "KeyboardInterrupt": lambda: raised(KeyboardInterrupt()),
    "ValueError": lambda: raised(ValueError("two\nlines")),
    "UserError": lambda: raised(UserError("this cannot be")),
}
release = threading.Event()


def raised(fault):
    raise fault


class P(Plugin):
    """Leaves."""

    api = (2, 0)

    def __init__(self, *, place: str, way: str, alters: bool = False) -> None:
        self.place, self.way, self.seen = place, way, 0
        if alters or place in ("keep", "update", "encode"):
            self.alters = frozenset(Invariant) - {Invariant.TABLE_LAYOUT}
        self.leave("__init__")

    def leave(self, place: str, after: int = 3) -> None:
        if place == self.place:
            self.seen += 1
            if self.seen > after or place in ("__init__", "contribute", "report", "policy"):
                WAYS[self.way]()

    def contribute(self, ctx):
        self.leave("contribute")
        outer = self

        def stream(batches):
            for batch in batches:
                outer.leave("stream")
                yield batch

        def mapped(batches):
            return map(batch, batches)

        def batch(batch):
            outer.leave("batch")
            outer.leave("mapped")
            return batch

        @contextmanager
        def step(batch):
            outer.leave("step")
            yield

        def half(batches):
            return (batch for number, batch in enumerate(batches) if number % 2)

        def report(run):
            outer.leave("report")
            if outer.place == "figures":
                return {"fine": 1, "odd": raised_by_str()}
            return {"steps": run.steps}

        def thread(run):
            threading.Thread(target=release.wait, name="side work").start()
            return {}

        class Hooks(L.Callback):
            def on_train_batch_start(self, trainer, *_):
                outer.leave("on_train_batch_start")

            def on_train_batch_end(self, trainer, *_):
                outer.leave("on_train_batch_end")
                if outer.place == "should_stop":
                    trainer.should_stop = True

            def on_validation_batch_end(self, *_):
                outer.leave("on_validation_batch_end", 0)

            def state_dict(self):
                outer.leave("state_dict", 0)
                return {}

        class Order(EpochOrder):
            def __len__(self):
                return -(-ctx.epoch_samples // ctx.batch_size)

            def batches(self, first):
                for batch in ctx.batches(first):
                    outer.leave("order")
                    yield batch

        class Splits(Splitter):
            def split(self, batch, needs_cold):
                from recpipe.plugin import Split

                outer.leave("split")
                return Split(np.arange(len(needs_cold)), (len(needs_cold),))

        class Skips(Skipper):
            def keep(self, batch, number):
                outer.leave("keep")

            def update(self, rows, gradients):
                outer.leave("update")

        class Codec(RowCodec):
            def __init__(self, layout):
                self.bytes_per_record = 4 * layout.width

            def encode(self, records):
                outer.leave("encode")
                return records.view(np.uint8)

            def decode(self, encoded, out):
                out[:] = encoded.view(np.float32)

        class Codes(Quantizer):
            def cold(self, layout):
                return Codec(layout)

        class Policy(CachePolicy):
            def admit(self, hits, misses, looked_up):
                outer.leave("admit")
                return NOTHING

            def state_dict(self):
                return {}

            def load_state_dict(self, state):
                pass

        class Own(Cache):
            def policy(self, space):
                outer.leave("policy")
                return Policy(space)

        stream_part = {"mapped": mapped, "half": half}.get(self.place, stream)
        return Contribution(
            order=Order() if self.place == "order" else None,
            stream=[Link(stream_part, "stream")],
            batch=[Link(batch, "batch")] if self.place != "mapped" else [],
            splitter=Splits() if self.place == "split" else None,
            skipper=Skips() if self.place in ("keep", "update") else None,
            quantizer=Codes() if self.place == "encode" else None,
            cache=[Own()] if self.place in ("policy", "admit", "encode") else [],
            step=[Link(step, "step")],
            callbacks=[Hooks()],
            report=[thread if self.place == "thread" else report, lambda run: {"other": 2}],
        )


def raised_by_str():
    class Odd:
        def __str__(self):
            raise RuntimeError("no text")

    return Odd()
