"""What a server answers for: models, each with a version, whatever computes their outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from recpipe.errors import shown
from recpipe_serve.errors import Refused

if TYPE_CHECKING:
    from recpipe_serve.batching.forms import Array
    from recpipe_serve.http.protocol import InferenceRequest

READY, UNAVAILABLE = "READY", "UNAVAILABLE"
"""States of a model in a repository's index, as Triton names them."""


@dataclass(frozen=True)
class Answered:
    """The outputs of a request, by name, and what is said beside them (``parameters`` of the response: text,
    whole numbers, numbers, yes or no)."""

    outputs: Mapping[str, Array]
    parameters: Mapping[str, bool | int | float | str] = field(default_factory=dict)


class ServedModel(Protocol):
    """One version of one model behind the open inference protocol. Its JSON is KServe's and Triton's, which
    the messages of gRPC have field by field."""

    name: str
    version: str

    @property
    def ready(self) -> bool:
        """Whether it answers requests."""

    def metadata(self) -> dict[str, Any]:
        """``ModelMetadataResponse``: name, versions, platform, inputs and outputs."""

    def configuration(self) -> dict[str, Any]:
        """Triton's ``ModelConfig``."""

    def statistics(self) -> dict[str, Any]:
        """Triton's ``ModelStatistics``: how many requests and batches, and how long they took."""

    async def answer(self, request: InferenceRequest) -> Answered:
        """The outputs of a request; ``Refused`` says why there are none."""


class ServedModels(Protocol):
    """All models of one server."""

    @property
    def ready(self) -> bool:
        """Whether requests are answered."""

    def every(self) -> Sequence[ServedModel]:
        """All of them, by name and version."""

    def find(self, name: str, version: str = "") -> ServedModel:
        """A model; without a version the one that requests without one go to. ``Refused`` (404) if it is not
        here."""

    def index(self) -> list[dict[str, str]]:
        """What could be served: name, version, state and reason of each."""

    async def load(self, name: str) -> None:
        """Serve a model, or serve it as it is now. ``Refused`` if it cannot be, or clients may not ask."""

    async def unload(self, name: str) -> None:
        """Serve a model no longer. ``Refused`` as ``load``."""


class OneModel:
    """The models of a server that has one, which nobody can load or unload from afar."""

    def __init__(self, model: ServedModel) -> None:
        self.model = model

    @property
    def ready(self) -> bool:
        """Whether it answers requests."""
        return self.model.ready

    def every(self) -> Sequence[ServedModel]:
        """The one."""
        return [self.model]

    def find(self, name: str, version: str = "") -> ServedModel:
        """The one, if it is meant; ``Refused`` else."""
        if name != self.model.name or version not in ("", self.model.version):
            what = f"'{shown(name)}' of version {shown(version or self.model.version)}"
            has = f"'{self.model.name}' of version {self.model.version}"
            raise Refused(404, "unknown_model", f"no model {what} here; there is {has}")
        return self.model

    def index(self) -> list[dict[str, str]]:
        """The one."""
        return [
            {
                "name": self.model.name,
                "version": self.model.version,
                "state": READY if self.ready else UNAVAILABLE,
                "reason": "",
            }
        ]

    async def load(self, name: str) -> None:
        """``Refused``."""
        self._refuse(name)

    async def unload(self, name: str) -> None:
        """``Refused``."""
        self._refuse(name)

    def _refuse(self, name: str) -> None:
        self.find(name)
        raise Refused(403, "not_allowed", "models are not loaded and unloaded from afar here")
