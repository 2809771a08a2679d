"""The models of a repository: each version is a package of its own, loaded beside the others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from starlette.applications import Starlette

from recpipe.answers.score import DIGEST
from recpipe.errors import UserError, shown
from recpipe_serve.config import ServeConfig
from recpipe_serve.errors import Refused
from recpipe_serve.http.acceptor import Acceptor
from recpipe_serve.http.app import Server
from recpipe_serve.http.connections import IncomingRequest, Infer, Listener
from recpipe_serve.http.metrics import DoorMetrics
from recpipe_serve.http.several import together
from recpipe_serve.http.surface import Surface
from recpipe_serve.models import READY, UNAVAILABLE, ServedModels, entry
from recpipe_serve.repository.layout import ModelFolder, Routes, read_model, read_repository
from recpipe_serve.repository.shadow import Shadow
from recpipe_serve.repository.turns import Turns
from recpipe_serve.served import ServedPackage, require_same

log = logging.getLogger("recpipe")


class Group:
    """The versions of one model, and where requests without a version go."""

    def __init__(self, folder: ModelFolder, packages: dict[int, ServedPackage]) -> None:
        self.name, self.packages = folder.name, packages
        self.use(folder.routes)

    def use(self, routes: Routes) -> None:
        """Send requests by these ``routes`` from now on; figures of a canary and a shadow begin anew where
        they change."""
        for package in self.packages.values():
            package.server.mirror, package.server.routes = None, self.told
            package.server.batcher.beside = False
        self.routes = routes
        self.primary = self.packages[routes.version].server
        self._canary = self._shadow = None
        self.by = dict.fromkeys(self.packages, 0)
        """Requests without a version, by the one that answered them."""
        if routes.canary is not None:
            self._canary = self.packages[routes.canary.version].server, Turns(routes.canary.share)
        if routes.shadow is not None:
            server = self.packages[routes.shadow.version].server
            self._shadow = Shadow(self.primary, server, routes.shadow.share)
            self.primary.mirror = self._shadow.saw

    def chosen(self) -> Server:
        """Which version answers the next request."""
        server = self.primary
        if self._canary is not None and self._canary[1].take():
            server = self._canary[0]
        self.by[int(server.version)] += 1
        return server

    def infer(self, request: IncomingRequest) -> None:
        """Answer a request without a version."""
        self.chosen().infer(request)

    def told(self) -> dict[str, Any]:
        """Where requests go, for people."""
        canary = self.routes.canary
        return {
            "name": self.name,
            "version": self.routes.version,
            "versions": sorted(self.packages),
            "requests": {str(version): count for version, count in self.by.items() if count},
            "canary": canary and {"version": canary.version, "share": canary.share},
            "shadow": self._shadow and self._shadow.told(),
        }


class Repository(ServedModels[Server]):
    """All models in ``directory``, served by this process as ``config`` says."""

    def __init__(self, directory: Path, config: ServeConfig) -> None:
        self.directory, self.config = directory, config
        self.metrics = DoorMetrics()
        self.addresses: dict[bytes, Infer] = {}
        """The paths to which requests for scores are posted."""
        self._groups: dict[str, Group] = {}
        self._unloaded: set[str] = set()
        """Models that clients have unloaded, which a reload leaves so."""
        self._alive, self._changing = False, asyncio.Lock()
        for folder in read_repository(directory).values():
            packages = {number: self._load(folder, number) for number in folder.routes.served}
            self._put(folder, packages)

    @property
    def models(self) -> ServedModels[Server]:
        """Itself."""
        return self

    @property
    def described(self) -> str:
        """What is served, and by how much golden scores differ at most."""
        served = ", ".join(f"{name} ({told})" for name, told in self._versions().items())
        return f"{served or 'nothing'} {self.difference:.1e}"

    def _versions(self) -> dict[str, str]:
        return {name: ", ".join(map(str, sorted(own.packages))) for name, own in self._groups.items()}

    @property
    def difference(self) -> float:
        """By how much golden scores differ at most."""
        packages = [own for group in self._groups.values() for own in group.packages.values()]
        return max((own.difference for own in packages), default=0.0)

    @property
    def ready(self) -> bool:
        """Whether requests are scored."""
        return self._alive

    def every(self) -> Sequence[Server]:
        """All versions of all models."""
        return [own.packages[n].server for own in self._groups.values() for n in sorted(own.packages)]

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
        async with self._changing:
            try:
                await self._take(read_model(self.directory, name))
            except UserError as fault:
                raise Refused(400, "not_loaded", str(fault)) from fault
            self._unloaded.discard(name)

    async def unload(self, name: str) -> None:
        """Serve a model no longer; requests that it has are answered."""
        self._require_control()
        self._group(name)
        async with self._changing:
            self._unloaded.add(name)
            await self._drop(name)

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

    def _load(self, folder: ModelFolder, number: int) -> ServedPackage:
        return ServedPackage(folder.versions[number], self.config, folder.name, str(number))

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
            self._groups[folder.name] = group = Group(folder, packages)
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
        return await asyncio.to_thread(together, self.metrics, own, [g.told() for g in self._groups.values()])

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncIterator[None]:
        for server in self.every():
            server.start()
        self._alive = True
        yield
        self._alive = False
        for server in self.every():
            await server.close()

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
