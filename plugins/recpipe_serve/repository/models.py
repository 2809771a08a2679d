"""The models of a repository: each version is a package of its own, loaded beside the others."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from recpipe.answers.score import DIGEST
from recpipe.errors import UserError, shown
from recpipe_serve.batching.statistics import SHARED
from recpipe_serve.config import ServeConfig
from recpipe_serve.errors import Refused
from recpipe_serve.http.acceptor import Acceptor
from recpipe_serve.http.app import Server
from recpipe_serve.http.connections import IncomingRequest, Infer, Listener
from recpipe_serve.http.metrics import DoorMetrics
from recpipe_serve.http.several import together
from recpipe_serve.http.surface import Surface
from recpipe_serve.models import READY, UNAVAILABLE, ServedModels, entry
from recpipe_serve.repository.counted import SharedRouted
from recpipe_serve.repository.labels import join
from recpipe_serve.repository.layout import ModelFolder, Routes, read_model, read_repository
from recpipe_serve.repository.shadow import Shadow
from recpipe_serve.repository.turns import Turns
from recpipe_serve.served import ServedPackage, require_same

log = logging.getLogger("recpipe")
LOAD, UNLOAD = "load", "unload"
"""What one worker asks all."""
YES = "yes"
UNLOADED = "unloaded.json"
"""Where workers that start again find which models clients have unloaded."""


class Group:
    """The versions of one model, and where requests without a version go. ``counted``: how many went where,
    of all workers."""

    def __init__(
        self, folder: ModelFolder, packages: dict[int, ServedPackage], counted: SharedRouted
    ) -> None:
        self.name, self.packages, self.counted = folder.name, packages, counted
        self.use(folder.routes)

    def use(self, routes: Routes) -> None:
        """Send requests by these ``routes`` from now on; figures of a canary and a shadow begin anew where
        they change."""
        for package in self.packages.values():
            server = package.server
            server.mirror, server.routes, server.join = None, self.told, partial(self._join, server)
            server.batcher.beside = False
        self.routes = routes
        self.primary = self.packages[routes.version].server
        self._canary = self._shadow = None
        self.counted.begin(repr(routes))
        if routes.canary is not None:
            self._canary = self.packages[routes.canary.version].server, Turns(routes.canary.share)
        if routes.shadow is not None:
            server = self.packages[routes.shadow.version].server
            self._shadow = Shadow(self.primary, server, routes.shadow.share, self.counted)
            self.primary.mirror = self._shadow.saw

    def chosen(self) -> Server:
        """Which version answers the next request."""
        server = self.primary
        if self._canary is not None and self._canary[1].take():
            server = self._canary[0]
        self.counted.own.by[int(server.version)] += 1
        return server

    def infer(self, request: IncomingRequest) -> None:
        """Answer a request without a version."""
        self.chosen().infer(request)

    async def _join(self, own: Server, body: bytes) -> dict[str, int]:
        """Take the labels that came to one version, of requests that any of them answered."""
        shadow = None if self._shadow is None else self._shadow.server
        servers = [self.packages[number].server for number in sorted(self.packages)]
        answering = [server for server in servers if server is not own and server is not shadow]
        return await join(own, answering, None if shadow is own else shadow, body)

    def told(self) -> dict[str, Any]:
        """Where requests go, and how well each version does, for people. In some milliseconds for each
        version; any thread may ask."""
        figures = {str(n): _figures(self.packages[n].server) for n in sorted(self.packages)}
        return {**self.routed(), "figures": figures}

    def routed(self) -> dict[str, Any]:
        """Where requests go."""
        canary, counted = self.routes.canary, self.counted.all()
        return {
            "name": self.name,
            "version": self.routes.version,
            "versions": sorted(self.packages),
            "requests": {str(version): count for version, count in sorted(counted.by.items()) if count},
            "canary": canary and {"version": canary.version, "share": canary.share},
            "shadow": self._shadow and self._shadow.told(counted),
        }


def _figures(server: Server) -> dict[str, Any]:
    """Of a version, by its outputs: the mean prediction, how many labelled samples there are, and what they
    say, all of its monitor's latest samples."""
    figures = server.monitor.compared().figures
    labels = figures["labels"]
    found: dict[str, Any] = {}
    for name in server.outputs:
        quality = {figure: own["value"] for figure, own in labels["tasks"][name].items()}
        mean = figures["scores"][name]["mean"]["window"]
        found[name] = {"mean": mean, "labelled": labels["samples"][name], **quality}
    return found


class Repository(ServedModels[Server]):
    """All models in ``directory``, served by this process as ``config`` says. ``folder``: where the workers
    of a server, of which this is the one of this ``number``, share what they see, and have the tables' memory
    in common; None: there is one."""

    def __init__(
        self, directory: Path, config: ServeConfig, folder: Path | None = None, number: int = 0
    ) -> None:
        self.directory, self.config, self._folder, self._number = directory, config, folder, number
        self.metrics = DoorMetrics()
        self.everywhere: Callable[[str], Awaitable[list[str]]] | None = None
        """Has all workers do what ``answered`` takes, and gives what each says to it; None: there is one."""
        self.addresses: dict[bytes, Infer] = {}
        """The paths to which requests for scores are posted."""
        self._groups: dict[str, Group] = {}
        self._unloaded: set[str] = set()
        """Models that clients have unloaded, which a reload leaves so."""
        self._alive, self._changing = False, asyncio.Lock()
        if folder is not None and (kept := folder / UNLOADED).is_file():
            self._unloaded = {*json.loads(kept.read_bytes())}
        for model in read_repository(directory).values():
            if model.name not in self._unloaded:
                self._put(model, {version: self._load(model, version) for version in model.routes.served})

    @property
    def models(self) -> ServedModels[Server]:
        """Itself."""
        return self

    @property
    def described(self) -> str:
        """What is served, without blanks, and by how much golden scores differ at most."""
        served = ",".join(f"{name}({told})" for name, told in self._versions().items())
        digests = [(*at, own.loaded.package) for at, own in self._packages.items()]
        digest = blake2b(json.dumps(digests).encode(), digest_size=4).hexdigest()
        return f"{served.replace(' ', '_') or 'nothing'}-{digest} {self.difference:.1e}"

    def _versions(self) -> dict[str, str]:
        return {name: ",".join(map(str, sorted(own.packages))) for name, own in sorted(self._groups.items())}

    @property
    def _packages(self) -> dict[tuple[str, int], ServedPackage]:
        """All that are served, by name and version."""
        groups = sorted(self._groups.items())
        return {(name, n): own.packages[n] for name, own in groups for n in sorted(own.packages)}

    @property
    def difference(self) -> float:
        """By how much golden scores differ at most."""
        return max((own.difference for own in self._packages.values()), default=0.0)

    @property
    def ready(self) -> bool:
        """Whether requests are scored."""
        return self._alive

    def every(self) -> Sequence[Server]:
        """All versions of all models."""
        return [own.server for own in self._packages.values()]

    def _group(self, name: str) -> Group:
        if name not in self._groups:
            there = ", ".join(f"'{own}'" for own in self._groups) or "none"
            raise Refused(404, "unknown_model", f"no model '{shown(name)}' here; there is {there}")
        return self._groups[name]

    def find(self, name: str, version: str = "") -> Server:
        """A version; without one, that to which requests without one go."""
        group = self._group(name)
        if not version:
            return group.primary
        found = next((own for n, own in group.packages.items() if str(n) == version), None)
        if found is None:
            there = ", ".join(map(str, sorted(group.packages)))
            raise Refused(
                404, "unknown_model", f"no version {shown(version)} of '{name}' here; there is {there}"
            )
        return found.server

    def chosen(self, name: str, version: str = "") -> Server:
        """What answers the next request."""
        return self.find(name, version) if version else self._group(name).chosen()

    def index(self) -> list[dict[str, str]]:
        """All versions in the directory, and whether they are served."""
        lines = []
        try:
            there = read_repository(self.directory)
        except UserError as fault:
            log.warning("%s", fault)
            there = {}
        served = {name: own.packages.keys() for name, own in self._groups.items()}
        for name in sorted({*there, *served}):
            own = set(served.get(name, ()))
            for number in sorted({*(there[name].versions if name in there else ()), *own}):
                ready = number in own
                why = "" if ready else "unloaded" if name in self._unloaded else "no route leads to it"
                lines.append(entry(name, str(number), READY if ready else UNAVAILABLE, why))
        return lines

    async def load(self, name: str) -> None:
        """Serve a model as its directory has it now."""
        self._require_control()
        await self._everywhere(LOAD, name)

    async def unload(self, name: str) -> None:
        """Serve a model no longer; requests that it has are answered."""
        self._require_control()
        self._group(name)
        await self._everywhere(UNLOAD, name)

    async def _everywhere(self, what: str, name: str) -> None:
        """Do so in all workers; ``Refused`` if one of them cannot."""
        asked = f"{what} {name}"
        said = [await self.answered(asked)] if self.everywhere is None else await self.everywhere(asked)
        fault = next((own for own in said if own != YES), None)
        if fault is not None:
            raise Refused(400, "not_loaded", fault)

    async def answered(self, text: str) -> str:
        """Load or unload a model in this process, as one of the workers was asked to; what it says to
        that."""
        what, _, name = text.partition(" ")
        async with self._changing:
            try:
                if what == LOAD:
                    await self._take(read_model(self.directory, name))
                    self._unloaded.discard(name)
                else:
                    self._unloaded.add(name)
                    if name in self._groups:
                        await self._drop(name)
            except UserError as fault:
                return str(fault)
            if self._folder is not None:
                beside = self._folder / f"{UNLOADED}.{self._number}"
                beside.write_text(json.dumps(sorted(self._unloaded)))
                beside.replace(self._folder / UNLOADED)
        return YES

    def _require_control(self) -> None:
        if not self.config.model_control:
            allowed = "models are loaded and unloaded from afar where the server has model_control=true"
            raise Refused(403, "not_allowed", allowed)

    def count_unknown(self, refused: Refused, seconds: float) -> None:
        """Count a request for scores of a model that is not here."""
        self.metrics.refused.labels(refused.reason).inc()
        self.metrics.answers.labels(str(refused.status)).inc()

    async def reload(self) -> None:
        """Serve what the directory has now; ``UserError`` for the first that could not be taken, after all
        others have been."""
        faults = []
        async with self._changing:
            there = await asyncio.to_thread(read_repository, self.directory)
            for name in [name for name in self._groups if name not in there]:
                await self._drop(name)
            for folder in there.values():
                if folder.name in self._unloaded:
                    continue
                try:
                    await self._take(folder)
                except UserError as fault:
                    faults.append(fault)
        if faults:
            raise faults[0]

    def _load(self, model: ModelFolder, version: int) -> ServedPackage:
        own = self._shared(model.name, str(version))
        place = model.versions[version], self.config, model.name, str(version)
        return ServedPackage(*place, folder=own, number=self._number, labelled=True)

    def _shared(self, *place: str) -> Path | None:
        """Where workers share what they see of a model, or of a version."""
        if self._folder is None:
            return None
        found = self._folder.joinpath("models", *place)
        found.mkdir(parents=True, exist_ok=True)
        return found

    async def _take(self, folder: ModelFolder) -> None:
        """Serve a model as ``folder`` has it: load versions that are new, and those anew that differ."""
        group = self._groups.get(folder.name)
        packages = {} if group is None else dict(group.packages)
        for number in folder.routes.served:
            if number not in packages:
                packages[number] = await asyncio.to_thread(self._load, folder, number)
            elif not _same(packages[number]):
                await packages[number].reload()
        self._require_alike(folder, packages)
        gone = {n: packages.pop(n) for n in list(packages) if n not in folder.routes.served}
        for number, package in packages.items():
            if group is None or number not in group.packages:
                package.server.start()
        self._put(folder, packages)
        for package in gone.values():
            await self._end(package)

    def _put(self, folder: ModelFolder, packages: dict[int, ServedPackage]) -> None:
        """Let these answer from now on."""
        self._require_alike(folder, packages)
        before = self._groups.get(folder.name)
        if before is None:
            counted = SharedRouted(self._shared(folder.name), self._number)
            self._groups[folder.name] = group = Group(folder, packages, counted)
        else:
            group = before
            changed = group.packages.keys() != packages.keys() or group.routes != folder.routes
            group.packages = packages
            if changed:
                group.use(folder.routes)
        own = f"/v2/models/{folder.name}"
        self._forget(folder.name)
        self.addresses[f"{own}/infer".encode()] = group.infer
        for number, package in packages.items():
            self.addresses[f"{own}/versions/{number}/infer".encode()] = package.server.infer

    def _require_alike(self, folder: ModelFolder, packages: dict[int, ServedPackage]) -> None:
        """``UserError`` unless all versions take and give the same: a client does not know which answers."""
        first = packages[folder.routes.version]
        for package in packages.values():
            require_same(package.directory, first.loaded.scorer.manifest, package.loaded.scorer.manifest)

    def _forget(self, name: str) -> None:
        own = f"/v2/models/{name}/".encode()
        for path in [path for path in self.addresses if path.startswith(own)]:
            del self.addresses[path]

    async def _drop(self, name: str) -> None:
        self._forget(name)
        for package in self._groups.pop(name).packages.values():
            await self._end(package)

    async def _end(self, package: ServedPackage) -> None:
        await package.server.close()
        package.server.monitor.close()
        package.end()

    def listener(self, acceptor: Acceptor, stop: float = 10.0) -> Listener:
        """What serves them on the connections of ``acceptor``; ``stop``: seconds for the last requests."""
        app = Surface(self, self.config, self.text, self._lifespan).app()
        return Listener(app, acceptor, self.addresses, stop)

    async def text(self) -> bytes:
        """The figures of all for Prometheus, with each one's name and version."""
        servers = self.every()
        for server in servers:
            server.batcher.tell()
        own = {(server.name, server.version): server.metrics for server in servers}
        routes = [group.routed() for group in self._groups.values()]
        return await asyncio.to_thread(together, self.metrics, own, routes, self._folder is not None)

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        for server in self.every():
            server.start()
        self._alive = True
        sharing = asyncio.get_running_loop().create_task(self._keep_sharing())
        yield
        self._alive = False
        sharing.cancel()
        for server in self.every():
            await server.close()

    async def _keep_sharing(self) -> None:
        """Let other workers see where requests went, again and again."""
        while self._folder is not None:
            await asyncio.sleep(SHARED)
            for group in self._groups.values():
                group.counted.share()

    def begin(self) -> None:
        """Nothing is followed: deltas are of one package."""

    def end(self) -> None:
        """Nothing is asked any more."""
        for group in self._groups.values():
            for package in group.packages.values():
                package.end()


def _same(package: ServedPackage) -> bool:
    """Whether the package is in its directory as it was loaded."""
    try:
        return (package.directory / DIGEST).read_text()[:12] == package.loaded.package
    except OSError:
        return False
