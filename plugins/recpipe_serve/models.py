"""What a server answers for: models, each with a version, whatever computes their outputs."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from recpipe.errors import shown
from recpipe_serve.errors import Refused

if TYPE_CHECKING:
    from recpipe_serve.batching.forms import Array
    from recpipe_serve.http.protocol import InferenceRequest

log = logging.getLogger("recpipe")
EXTENSIONS = ["binary_tensor_data", "model_configuration", "statistics", "model_repository"]
"""What a server has beyond the protocol's core, as Triton names it."""
READY, UNAVAILABLE = "READY", "UNAVAILABLE"
"""States of a model in a repository's index, as Triton names them."""


@dataclass(frozen=True)
class Outputs:
    """The outputs of a request, by name, and what is said beside them (``parameters`` of the response: text,
    whole numbers, numbers, yes or no)."""

    values: Mapping[str, Array]
    parameters: Mapping[str, bool | int | float | str] = field(default_factory=dict)


class ServedModel(ABC):
    """One version of one model behind the open inference protocol. Its JSON is KServe's and Triton's, which
    the messages of gRPC have field by field. All calls come from the event loop's thread."""

    name: str
    version: str
    """A whole number, as Triton has versions."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether it answers requests."""

    @abstractmethod
    def metadata(self) -> dict[str, Any]:
        """``ModelMetadataResponse``: name, versions, platform, inputs and outputs."""

    @abstractmethod
    def configuration(self) -> dict[str, Any]:
        """Triton's ``ModelConfig``."""

    @abstractmethod
    def statistics(self) -> dict[str, Any]:
        """Triton's ``ModelStatistics``: how many requests and batches, and how long they took."""

    @abstractmethod
    async def answer(self, request: InferenceRequest) -> Outputs:
        """The outputs of a request; ``Refused`` says why there are none."""

    def refused(self, fault: Exception) -> Refused:
        """What a client is told in the place of outputs; what is not a refusal is the server's fault, and
        logged."""
        if isinstance(fault, Refused):
            return fault
        log.error("a request failed", exc_info=fault)
        return Refused(500, "fault", "the server failed; its log says why")

    def count(self, status: int, seconds: float) -> None:  # noqa: B027  who does not count need not say so
        """Count a request for outputs that was answered with HTTP's ``status`` after so many ``seconds``."""


Model = TypeVar("Model", bound=ServedModel)


class ServedModels(ABC, Generic[Model]):
    """All models of one server."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether requests are answered."""

    @abstractmethod
    def every(self) -> Sequence[Model]:
        """All of them, by name and version."""

    @abstractmethod
    def find(self, name: str, version: str = "") -> Model:
        """A model; without a version the one that requests without one go to. ``Refused`` (404) if it is not
        here."""

    def chosen(self, name: str, version: str = "") -> Model:
        """What answers the next request for outputs; where requests without a version go to several, the one
        whose turn it is."""
        return self.find(name, version)

    @abstractmethod
    def index(self) -> list[dict[str, str]]:
        """What could be served: name, version, state and reason of each."""

    @abstractmethod
    async def load(self, name: str) -> None:
        """Serve a model, or serve it as it is now. ``Refused`` if it cannot be, or clients may not ask."""

    @abstractmethod
    async def unload(self, name: str) -> None:
        """Serve a model no longer. ``Refused`` as ``load``."""

    @abstractmethod
    def count_unknown(self, refused: Refused, seconds: float) -> None:
        """Count a request for outputs of a model that is not here."""


class OneModel(ServedModels[Model]):
    """The models of a server that has one, which nobody can load or unload from afar. ``unknown``: see
    ``count_unknown``; None: they are not counted."""

    def __init__(self, model: Model, unknown: Callable[[Refused, float], None] | None = None) -> None:
        self.model, self._unknown = model, unknown

    @property
    def ready(self) -> bool:
        """Whether it answers requests."""
        return self.model.ready

    def every(self) -> Sequence[Model]:
        """The one."""
        return [self.model]

    def find(self, name: str, version: str = "") -> Model:
        """The one, if it is meant; ``Refused`` else."""
        if name != self.model.name or version not in ("", self.model.version):
            what = f"'{shown(name)}' of version {shown(version or self.model.version)}"
            has = f"'{self.model.name}' of version {self.model.version}"
            raise Refused(404, "unknown_model", f"no model {what} here; there is {has}")
        return self.model

    def index(self) -> list[dict[str, str]]:
        """The one."""
        return [entry(self.model.name, self.model.version, READY if self.ready else UNAVAILABLE)]

    async def load(self, name: str) -> None:
        """``Refused``."""
        self._refuse(name)

    async def unload(self, name: str) -> None:
        """``Refused``."""
        self._refuse(name)

    def _refuse(self, name: str) -> None:
        self.find(name)
        raise Refused(403, "not_allowed", "models are not loaded and unloaded from afar here")

    def count_unknown(self, refused: Refused, seconds: float) -> None:
        """Count a request for another one."""
        if self._unknown is not None:
            self._unknown(refused, seconds)


def require_own_files(parameters: Iterable[str]) -> None:
    """``Refused`` if a client sends a model's configuration or files with the request to load it, by the
    names of Triton's ``parameters`` for these."""
    sent = next((own for own in parameters if own == "config" or own.startswith("file:")), None)
    if sent is not None:
        raise Refused(
            400, "not_loaded", f"'{shown(sent)}' is not taken: a model is loaded as it is in its directory"
        )


def entry(name: str, version: str, state: str, reason: str = "") -> dict[str, str]:
    """A line of a repository's index."""
    return {"name": name, "version": version, "state": state, "reason": reason}
