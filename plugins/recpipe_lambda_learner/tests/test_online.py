"""Effects of a package: what a scorer adds has the bits of what the task computed, and a server learns posted
events, each once."""

from __future__ import annotations

import http.client
import json
import logging
import random
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from recpipe_lambda_learner.config import PublishConfig
from recpipe_lambda_learner.effects import Effects, Seen
from recpipe_lambda_learner.online import Learner
from recpipe_lambda_learner.posterior import Learning
from recpipe_lambda_learner.publish import Publisher, coefficients
from recpipe_lambda_learner.rows import Keeping
from safetensors.torch import save_file

from recpipe.answers.delta import Change, Delta, Version, following, write_delta
from recpipe.answers.effects import (
    FOLDER,
    Learnt,
    LearntEffect,
    apply_coefficients,
    identity,
    newest_effects,
    packaged_effects,
    say_learnt,
    write_effects,
)
from recpipe.answers.manifest import write_manifest
from recpipe.answers.score import (
    MISSING_KEY,
    Bags,
    PackageError,
    RowMap,
    Scorer,
    Tables,
    check_effects,
    tensors,
)
from recpipe.answers.score import Effects as Packaged
from recpipe.errors import UserError
from recpipe.plugin.load import installed, instantiate
from recpipe.tasks.plugins import default_knobs

pytest.importorskip("uvicorn", reason="recpipe[serve] is not installed")
pytest.importorskip("prometheus_client", reason="recpipe[serve] is not installed")

from recpipe_serve.batching.corrected import Corrected
from recpipe_serve.config import ServeConfig
from recpipe_serve.http.app import Server
from recpipe_serve.http.learning import Learning as Taking
from recpipe_serve.http.learning import read_token
from recpipe_serve.tests.listening import listening

ROWS, DIM, TOKEN = 50, 4, "0123456789abcdef"
CONTENT: dict[str, Any] = {
    "dense": {"names": ["x", "y"]},
    "sparse": [{"name": "item", "rows": ROWS}, {"name": "user", "rows": 9, "map": "user"}],
    "outputs": [{"name": "score", "kind": "clicks"}],
    "lookups": [{"pooling": "mean", "parts": [["item", "item"], ["user", "user"]]}],
    "tables": {
        name: {"rows": rows, "dimension": DIM, "type": "fp32", "file": f"{name}.safetensors"}
        for name, rows in (("item", ROWS), ("user", 9))
    },
}
INPUTS = {"user": ("intercept", "y", "item"), "item": ("x",)}
USERS = np.array([MISSING_KEY, -5, 3, 2**60, 17, 400])
"""Keys of users, of which the model knows the first three."""


class Small(Scorer):
    """A package's scorer without compiled code: the model's logit is 2x - y."""

    def __init__(self, directory: Path, content: dict[str, Any]) -> None:
        self.directory, self.manifest, self.unknown = directory, content, 0
        self.rows = torch.tensor([feature["rows"] for feature in content["sparse"]])
        self.tables = Tables(directory, content["tables"])
        self.lookups = [self.lookup(found) for found in content["lookups"]]
        self.maps = {1: RowMap(torch.from_numpy(USERS[:3]), torch.tensor([0, 3, 2], dtype=torch.int32))}
        self.effects = Packaged(self)

    def scores(self, dense: torch.Tensor, found: list[torch.Tensor]) -> torch.Tensor:
        return 2 * dense[:, 0] - dense[:, 1]


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Effects, Small]:
    """A package's folder, the effects in it as they were learnt, and its scorer."""
    folder = tmp_path_factory.mktemp("package")
    rng, how = np.random.default_rng(0), Learning(ridge=0.5)
    for about in CONTENT["tables"].values():
        values = rng.normal(size=(about["rows"], DIM)).astype(np.float32)
        save_file({"rows": torch.from_numpy(values.view(np.uint8).copy())}, folder / about["file"])
    each = tuple(
        LearntEffect(n, own, sum(DIM if i == "item" else 1 for i in own)) for n, own in INPUTS.items()
    )
    (folder / "MANIFEST.json").write_text("a checkpoint's")
    told = Learnt("c", "", 3, 100, 0.5, 0.8, "full", each)
    effects = Effects({own.entity: own.width for own in each}, how, Keeping(100))
    for _ in range(3):
        seen, clicks = drawn(rng, effects), (rng.random(40) < 0.4).astype(float)
        effects.learn(seen, clicks, np.ones(40), rng.normal(size=40))
    write_effects(folder / "run" / FOLDER, told, effects.save)
    with pytest.raises(UserError, match="these coefficients correct c: package that one"):
        packaged_effects(folder / "run", folder, folder / "other", CONTENT)
    told = Learnt(**{**vars(told), "model": identity(folder), "number": 4})
    write_effects(folder / "run" / FOLDER, told, effects.save)
    content = {**CONTENT, **packaged_effects(folder / "run", folder, folder, CONTENT)}
    return folder, effects, Small(folder, content)


def drawn(rng: np.random.Generator, effects: Effects, size: int = 40) -> list[Seen]:
    entities = {"user": rng.choice(USERS[:5], size), "item": rng.integers(0, 20, size)}
    return [Seen(entities[e.name], rng.normal(size=(size, e.width))) for e in effects.each]


def samples(rng: np.random.Generator, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Dense inputs, items and users, of which some have no row, and no coefficients."""
    dense = torch.from_numpy(rng.normal(size=(size, 2)).astype(np.float32))
    return dense, torch.from_numpy(rng.integers(0, ROWS, size)), torch.from_numpy(rng.choice(USERS, size))


def wanted(effects: Effects, small: Small, *of: torch.Tensor) -> np.ndarray:
    """What the task would say: its inputs made of the tables by hand."""
    dense, items, users = of
    table = (
        small.tables.rows[small.tables.starts["item"] :][: 4 * DIM * ROWS].view(torch.float32).view(ROWS, DIM)
    )
    x, y = (dense[:, [n]].double().numpy() for n in (0, 1))
    given = [np.hstack([np.ones((len(x), 1)), y, table[items].double().numpy()]), x]
    seen = [Seen(users.numpy(), given[0]), Seen(items.numpy(), given[1])]
    return effects.logits(seen, small.scores(dense, []).double().numpy())


def test_a_scorer_adds_what_the_task_computed_bit_for_bit(learnt: tuple[Path, Effects, Small]) -> None:
    folder, effects, small = learnt
    dense, items, users = samples(np.random.default_rng(1), 30)
    found = small(dense, torch.cat([items, users]), torch.ones(60, dtype=torch.int64))
    np.testing.assert_array_equal(
        found.numpy(), wanted(effects, small, dense, items, users).astype(np.float32)
    )
    assert (found - small.scores(dense, [])).abs().max() > 0.1
    two = torch.ones(60, dtype=torch.int64)
    two[30:32] = torch.tensor([2, 0])
    with pytest.raises(ValueError, match="'user' has not one id for each sample"):
        small(dense, torch.cat([items, users]), two)
    content = {
        **small.manifest,
        "files": {n: "" for own in small.manifest["effects"] for n in (own["ids"], own["file"])},
    }
    for inputs, why in (
        (["last_layer"], "last_layer, which the compiled model"),
        (["z"], "'z', which is no column"),
    ):
        wrong = {**content, "effects": [{**content["effects"][0], "inputs": inputs}]}
        with pytest.raises(PackageError, match=why):
            check_effects(folder, wrong)
    with pytest.raises(PackageError, match="has not the coefficients of 'user'"):
        check_effects(
            folder, {**content, "effects": [{**content["effects"][0], "file": content["effects"][1]["file"]}]}
        )


def test_the_last_layer_is_an_input_where_the_programs_give_it(
    learnt: tuple[Path, Effects, Small],
) -> None:
    folder, _, small = learnt
    about = {**small.manifest["effects"][1], "inputs": ["last_layer"], "width": 1}  # of item, by one number
    content = {**small.manifest, "effects": [about], "last_layer": 1}
    check_effects(folder, {**content, "files": {about["ids"]: "", about["file"]: ""}})
    dense, items, users = samples(np.random.default_rng(5), 10)
    own, plain = Small(folder, content), Small(folder, {**small.manifest, "effects": []})
    own.last_layer = dense[:, :1] * 3
    lengths = torch.ones(20, dtype=torch.int64)
    found, logits = (each(dense, torch.cat([items, users]), lengths).double() for each in (own, plain))
    rows, means = own.effects.each[0][2], own.effects.each[0][3]
    wanted = logits + means[rows(items), 0] * (dense[:, 0] * 3).double()
    assert torch.equal(found.float(), wanted.float())
    assert (found - logits).abs().max() > 0.01


def test_coefficients_of_a_delta_are_taken_and_undone(
    learnt: tuple[Path, Effects, Small], tmp_path: Path
) -> None:
    folder, effects, small = learnt
    rng, live = (
        np.random.default_rng(6),
        Effects({own.name: own.width for own in effects.each}, effects.each[0].how, Keeping(100)),
    )
    live.load(newest_effects(folder / "run")[0])
    asked = samples(rng, 30)

    def scores() -> torch.Tensor:
        dense, items, users = asked
        return small(dense, torch.cat([items, users]), torch.ones(60, dtype=torch.int64))

    before, version = scores(), Version("b" * 64, 0, "b" * 64, 7)
    for effect in live.each:
        effect.noted = []
    seen = drawn(rng, live)
    seen[0].entities[:3] = [400, 2**50, MISSING_KEY]  # some that have no row yet
    live.learn(seen, np.ones(40), np.ones(40), np.zeros(40))
    changed = {e.name: coefficients(e, np.unique(np.concatenate(e.noted or []))) for e in live.each}
    delta = write_delta(tmp_path, version, Change(7, 2.0, 1.0, {}, {}, {}, effects=changed, learnt=5))
    delta = Delta.read(delta.directory)
    assert delta.content["schema"] == 2
    numbers = {about["entity"]: n for n, about in enumerate(small.manifest["effects"])}
    undone = []
    for entity, own in delta.coefficients(small.manifest):
        held, rows = small.effects, torch.from_numpy(own.rows)
        there = rows[rows < len(held.each[numbers[entity]][3])]
        means, keys = held.each[numbers[entity]][3], held.keys[numbers[entity]]
        undone.append((numbers[entity], there, keys[there], means[there], len(means)))
        keys, means = (torch.from_numpy(each.copy()) for each in (own.records[:, 0], own.parts["means"]))
        held.take(numbers[entity], rows, keys, means, own.used)
    np.testing.assert_array_equal(scores().numpy(), wanted(live, small, *asked).astype(np.float32))
    assert not torch.equal(scores(), before)
    for step in undone:
        small.effects.take(*step)
    assert torch.equal(scores(), before)
    with pytest.raises(UserError, match="has other coefficients than the package's effect of 'user'"):
        [*delta.coefficients({"effects": [{**small.manifest["effects"][0], "width": 9}]})]


def test_a_publisher_goes_on_with_a_chain_wherever_its_own_state_is(
    learnt: tuple[Path, Effects, Small], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Base and deltas have the bits of what has learnt, also after it was killed and has fallen behind."""
    folder, _, small = learnt
    shutil.copytree(folder / FOLDER, tmp_path / "fresh" / "base.recpipe" / FOLDER)
    base = tmp_path / "fresh" / "base.recpipe"
    for own, whole in zip(small.manifest["effects"], newest_effects(folder / "run")[1].effects, strict=True):
        assert own["entity"] == whole.entity
    content = {**small.manifest, "step": 7}
    write_manifest(base, content)
    monkeypatch.setattr("recpipe_lambda_learner.publish.read_manifest", lambda file: content)
    told = newest_effects(base / FOLDER)[1]

    def begun() -> tuple[Effects, Publisher]:
        how = Learning(told.ridge, told.keep, "full")
        live = Effects({own.entity: own.width for own in told.effects}, how, Keeping(100))
        live.load(newest_effects(base / FOLDER)[0])
        return live, Publisher(PublishConfig(dir=str(tmp_path / "fresh"), every=1), live, told)

    def learn(live: Effects, seed: int) -> None:
        rng = np.random.default_rng(seed)
        live.learn(drawn(rng, live, 10), (rng.random(10) < 0.5).astype(float), np.ones(10), np.zeros(10))

    live, publisher = begun()
    publisher.publish(4)
    assert publisher.written == 0, "nothing differs"
    for number in range(3):
        learn(live, number)
        with monkeypatch.context() as patch:
            if number == 1:  # what has changed comes with the next one
                patch.setattr("recpipe_lambda_learner.publish.write_delta", full)
            publisher.publish(5 + number)
    assert (publisher.written, publisher.version.sequence) == (2, 2)
    with pytest.raises(UserError, match="another run publishes there"):
        begun()
    publisher.close()
    live, publisher = begun()  # from where the base is
    learn(live, 0)
    publisher.publish(5)
    assert publisher.version.sequence == 3
    publisher.close()
    held = {own["entity"]: shutil.copytree(base, tmp_path / own["entity"]) for own in content["effects"]}
    for delta in following(tmp_path / "fresh", Version.of_package(base, content)):
        for entity, changed in delta.coefficients(content):
            (about,) = [own for own in content["effects"] if own["entity"] == entity]
            apply_coefficients(held[entity], about, changed)
    live.save(tmp_path)
    for about in content["effects"]:
        for key in ("ids", "file"):
            places = held[about["entity"]] / about[key], tmp_path / Path(about[key]).name
            mine, right = map(tensors, places)
            assert mine.keys() == right.keys()
            for name, value in right.items():
                assert mine[name].numpy().tobytes() == value.numpy().tobytes(), (about["entity"], name)
    say_learnt(base, 5)
    assert newest_effects(base / FOLDER)[1].number == 5
    other = replace(told, precision="diagonal")
    with pytest.raises(UserError, match="has effects of another model, or others"):
        Publisher(PublishConfig(dir=str(tmp_path / "fresh")), live, other)


@contextmanager
def served(
    small: Small, learner: Learner | None, answers: Any = None
) -> Iterator[tuple[Server, http.client.HTTPConnection]]:
    """A server in this process, and a connection to it; ``answers``: stand in front of its model."""

    class Score:
        correct = Corrected(small.effects, learner)

        def __call__(self, dense: torch.Tensor, sides: Any) -> torch.Tensor:
            return small.scores(dense, [])

    learning = None if learner is None else Taking(TOKEN, 8)
    own: dict[str, Any] = {"maps": small.maps, "learning": learning, "learner": learner, "answers": answers}
    if answers is not None:
        answers.begin(small)
    server = Server(Score(), small.manifest, "m", ServeConfig(), **own)
    with (
        listening(server) as (port, _),
        closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection,
    ):
        yield server, connection


def body(dense: torch.Tensor, items: torch.Tensor, users: torch.Tensor, events: Any = None) -> dict[str, Any]:
    inputs = [
        {"name": "dense", "datatype": "FP32", "shape": list(dense.shape), "data": dense.flatten().tolist()}
    ]
    for name, own in (("item", items), ("user", users)):
        inputs.append({"name": name, "datatype": "INT64", "shape": [len(own)], "data": own.tolist()})
    return {"inputs": inputs} | ({} if events is None else {"events": events})


def post(
    connection: http.client.HTTPConnection, path: str, content: Any, token: str | None = TOKEN
) -> tuple[int, dict[str, Any]]:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    connection.request("POST", f"/v2/models/m/{path}", text, headers)
    response = connection.getresponse()
    return response.status, json.loads(response.read())


def test_events_that_are_posted_are_learnt_once_and_asked_for_at_once(
    learnt: tuple[Path, Effects, Small], tmp_path: Path
) -> None:
    folder, _, small = learnt
    rng, learner = np.random.default_rng(2), Learner(folder, tmp_path, 1000, 3600)
    other = Learner(folder, None, 1000, 3600)
    asked = samples(rng, 20)
    with served(small, learner) as (server, connection):

        def scores() -> np.ndarray:
            status, found = post(connection, "infer", body(*asked))
            assert status == 200, found
            return np.array(found["outputs"][0]["data"], np.float32)

        np.testing.assert_array_equal(scores(), wanted(other.effects, small, *asked).astype(np.float32))
        for number in range(3):
            dense, items, users = samples(rng, 30)
            clicks, weights = (rng.random(30) < 0.5).astype(float), rng.random(30)
            events = [
                {"id": f"{number}.{n}", "label": int(c), "weight": w}
                for n, (c, w) in enumerate(zip(clicks, weights, strict=True))
            ]
            given = body(dense, items, users, events)
            want = {"learnt": 30, "again": 0, "total": 30 * (number + 1), "saved": 0}
            assert post(connection, "learn", given) == (200, want)
            assert post(connection, "learn", given) == (200, want | {"learnt": 0, "again": 30})
            # What the task does with the same mini-batch.
            seen = [(ids.numpy(), x.numpy()) for ids, x in seen_by(small, dense, items, users)]
            offsets = small.scores(dense, []).double().numpy()
            other.effects.learn([Seen(*own) for own in seen], clicks, weights, offsets)
            np.testing.assert_array_equal(scores(), wanted(other.effects, small, *asked).astype(np.float32))
        # Of a body that has come in part, the rest is learnt.
        part = body(*samples(rng, 2), [{"id": "2.0", "label": 1}, {"id": "new", "label": 0}])
        assert post(connection, "learn", part)[1]["learnt"] == 1
        assert server.monitor.mine is not None
        learner.close()
    assert learner.saved == 91
    again = Learner(folder, tmp_path, 1000, 3600)
    assert again.claim(["2.0", "new", "newer"]).tolist() == [False, False, True]
    np.testing.assert_array_equal(
        wanted(again.effects, small, *asked), wanted(learner.effects, small, *asked)
    )
    assert newest_effects(tmp_path)[1].number == 4 + 4


def seen_by(small: Small, dense: torch.Tensor, items: torch.Tensor, users: torch.Tensor) -> Any:
    one = torch.ones(len(items), dtype=torch.int64)
    return small.effects.seen(dense, [Bags(items, items, one), Bags(users, small.maps[1](users), one)])


BAD: list[tuple[Any, str]] = [
    ([], "events is no list of an event for each of the 2"),
    ([{"id": "a", "label": 1}], "events is no list of an event for each of the 2"),
    ([{"id": "a", "label": 1}, {"id": 7, "label": 1}], "an event has no id"),
    ([{"id": "a", "label": 1}, {"id": "b" * 300, "label": 1}], "an event has no id"),
    ([{"id": "a", "label": 1}, {"id": "b", "label": 0.5}], "the label of event 'b' is 0.5, not 0 or 1"),
    ([{"id": "a", "label": 1}, {"id": "b"}], "the label of event 'b' is None"),
    ([{"id": "a", "label": True}, {"id": "b", "label": 0}], "the label of event 'a'"),
    ([{"id": "a", "label": 1, "weight": -1}, {"id": "b", "label": 0}], "the weight of event 'a' is -1"),
    ([{"id": "a", "label": 1, "weight": 1e9}, {"id": "b", "label": 0}], "the weight of event 'a'"),
]


@pytest.mark.parametrize("count", [300, pytest.param(10_000, marks=pytest.mark.soak)])
def test_bad_events_are_refused_and_counted_and_change_nothing(
    learnt: tuple[Path, Effects, Small], count: int
) -> None:
    folder, _, small = learnt
    rng, draw, learner = np.random.default_rng(3), random.Random(0), Learner(folder, None, 1000, 3600)
    of = samples(rng, 2)
    good = [{"id": "a", "label": 1}, {"id": "b", "label": 0}]
    with served(small, learner) as (server, connection):
        for token in (None, "", TOKEN[:-1], TOKEN + "0"):
            assert post(connection, "learn", body(*of, good), token)[0] == 401
        for events, why in BAD:
            status, found = post(connection, "learn", body(*of, events))
            assert (status, why in found["error"]) == (400, True), found
        before, whole, statuses = len(BAD) + 4, json.dumps(body(*of, good)).encode(), set()
        for number in range(count):
            data = bytearray(whole)
            for _ in range(draw.randint(1, 4)):
                data[draw.randrange(len(data))] = draw.randrange(256)
            if number % 3 == 0:
                data = data[: draw.randrange(len(data))]
            # Whatever the damage leaves, no event of it is one that may be learnt.
            data = bytearray(bytes(data).replace(b'"label"', b'"lable"'))
            statuses.add(post(connection, "learn", bytes(data))[0])
        assert statuses == {400}
        text = server.metrics.text().decode()
        assert f'recpipe_events_total{{result="refused"}} {before + count:.1f}' in text
        assert learner.total == 0
        assert post(connection, "learn", body(*of, good))[1] == {
            "learnt": 2,
            "again": 0,
            "total": 2,
            "saved": 0,
        }
    with served(small, None) as (_, connection):
        status, found = post(connection, "learn", body(*of, good))
        assert (status, "learn=true" in found["error"]) == (404, True)


def cached(unit: str) -> Any:
    """A cache of exact answers, of whole requests or of candidates."""
    return instantiate(
        "answer_cache", {**default_knobs(installed()["answer_cache"]), "bound": 0, "unit": unit}
    )


def shared(user: int, *items: int) -> dict[str, Any]:
    """A request of one user for some items."""
    return body(torch.ones(1, 2), torch.tensor(items), torch.tensor([user]))


def asked_for(connection: http.client.HTTPConnection, user: int, *items: int) -> np.ndarray:
    status, found = post(connection, "infer", shared(user, *items))
    assert status == 200, found
    return np.array(found["outputs"][0]["data"], np.float32)


def right(learner: Learner, small: Small, user: int, *items: int) -> np.ndarray:
    """What ``learner`` makes of it as it is now."""
    of = torch.ones(len(items), 2), torch.tensor(items), torch.full((len(items),), user)
    return wanted(learner.effects, small, *of).astype(np.float32)


ONE, TWO, NEW = 17, 2**60, 400
"""Users without a row in the model; the last one has no coefficients, either."""


@pytest.mark.parametrize("unit", ["request", "candidate"])
def test_a_cache_answers_nothing_that_an_event_has_changed(
    learnt: tuple[Path, Effects, Small], unit: str
) -> None:
    folder, _, small = learnt
    learner, cache = Learner(folder, None, 1000, 3600), cached(unit)
    with served(small, learner, cache) as (_, connection):

        def require(*missed: int) -> None:
            """All is right, and of these users alone the model was asked."""
            before = cache.cache.counts.missed
            for user in (ONE, TWO, NEW):
                found = asked_for(connection, user, 1, 2, 3)
                np.testing.assert_array_equal(found, right(learner, small, user, 1, 2, 3))
            assert cache.cache.counts.missed - before == len(missed) * (3 if unit == "candidate" else 1)

        def learn(*users: int) -> None:
            events = [{"id": f"{learner.total}.{n}", "label": 1} for n in range(len(users))]
            item = torch.full((len(users),), 40)
            given = body(torch.ones(len(users), 2), item, torch.tensor(users), events)
            assert post(connection, "learn", given)[1]["learnt"] == len(users)

        require(ONE, TWO, NEW)
        assert len({right(learner, small, user, 1).item() for user in (ONE, TWO, NEW)}) == 3
        require()
        learn(ONE)
        require(ONE)
        learn(NEW)
        require(NEW)
        # More new ones than there is room for: who was seen longest ago has no coefficients any more.
        learn(*range(1000, 1098))
        assert right(learner, small, TWO, 1) == right(learner, small, 9999, 1)
        require(TWO)


@pytest.mark.parametrize("careful", [True, False])
def test_no_answer_has_one_part_of_before_an_event_and_one_of_after(
    learnt: tuple[Path, Effects, Small], monkeypatch: pytest.MonkeyPatch, careful: bool
) -> None:
    """Of three candidates two are known, and coefficients change before the third one is scored."""
    folder, _, small = learnt
    learner, cache = Learner(folder, None, 1000, 3600), cached("candidate")
    learn, changed, go_on = learner.learn, threading.Event(), threading.Event()

    def slowly(*events: Any) -> Any:
        found = learn(*events)
        changed.set()
        assert go_on.wait(20)
        return found

    monkeypatch.setattr(learner, "learn", slowly)
    if not careful:
        monkeypatch.setattr(cache, "learning", lambda ids: None)
    with served(small, learner, cache) as (_, connection):
        asked_for(connection, ONE, 1, 2)
        event = body(torch.ones(1, 2), torch.tensor([40]), torch.tensor([ONE]), [{"id": "a", "label": 1}])
        with closing(http.client.HTTPConnection("127.0.0.1", connection.port, timeout=20)) as other:
            posting = threading.Thread(target=post, args=(other, "learn", event))
            posting.start()
            try:
                assert changed.wait(20)
                found = asked_for(connection, ONE, 1, 2, 3)
            finally:
                go_on.set()
                posting.join()
        assert np.array_equal(found, right(learner, small, ONE, 1, 2, 3)) == careful
        np.testing.assert_array_equal(
            asked_for(connection, ONE, 1, 2, 3), right(learner, small, ONE, 1, 2, 3)
        )


def test_what_was_not_learnt_may_come_again(learnt: tuple[Path, Effects, Small]) -> None:
    learner, rng = Learner(learnt[0], None, 3, 3600), np.random.default_rng(4)
    assert learner.claim(["a", "a", "b"]).tolist() == [True, False, True]
    with pytest.raises(ValueError, match="shorter"):
        learner.learn(["a", "b"], [(np.array([1]), np.ones((1, 1)))], *(np.ones(2),) * 3)
    assert learner.claim(["a", "b"]).all()
    seen = [(own.entities, own.inputs) for own in drawn(rng, learner.effects, 2)]
    learner.learn(["a", "b"], seen, *(np.ones(2),) * 3)
    # Ids of more events than are kept are forgotten, the first ones first.
    learner.claim(["c", "d"])
    learner.learn(["c", "d"], seen, *(np.ones(2),) * 3)
    assert learner.claim(["a", "b", "c", "d"]).tolist() == [True, False, False, False]


def test_on_a_full_disk_events_are_learnt_and_told_as_not_saved(
    learnt: tuple[Path, Effects, Small],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder, _, small = learnt
    learner, rng = Learner(folder, tmp_path / "learnt", 1000, 0), np.random.default_rng(8)
    monkeypatch.setattr(logging.getLogger("recpipe"), "propagate", True)
    with served(small, learner) as (_, connection):

        def learn(number: int) -> dict[str, Any]:
            status, told = post(
                connection,
                "learn",
                body(*samples(rng, 2), [{"id": f"{number}.{n}", "label": n} for n in (0, 1)]),
            )
            assert status == 200, told
            return told

        assert learn(0) == {"learnt": 2, "again": 0, "total": 2, "saved": 2}
        with monkeypatch.context() as patch:
            patch.setattr("recpipe_lambda_learner.online.save_tensors", full)
            assert learn(1) == {"learnt": 2, "again": 0, "total": 4, "saved": 2}
            assert "No space left on device; free space, or " in caplog.text
            with pytest.raises(UserError, match="cannot write .*: No space left on device"):
                learner.close()
        left = [*(tmp_path / "learnt" / FOLDER).iterdir()]
        assert len(left) == 1, "what was begun is removed"
        assert learn(2) == {"learnt": 2, "again": 0, "total": 6, "saved": 6}
    assert Learner(folder, tmp_path / "learnt", 1000, 0).total == 6


def full(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_token_is_one_line_that_is_hard_to_guess(tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")
    assert read_token(str(tmp_path / "token")) == TOKEN
    for text in ("short", "a token of some words"):
        (tmp_path / "token").write_text(text)
        with pytest.raises(UserError, match="has no token of 16 characters"):
            read_token(str(tmp_path / "token"))
    with pytest.raises(UserError, match="name a file with the token"):
        read_token(None)
    with pytest.raises(UserError, match="cannot be read"):
        read_token(str(tmp_path / "absent"))
