"""Answer servers: answer requests in the model's place, ``recpipe serve PACKAGE +plugin=NAME``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from recpipe.answers.score import Scorer
    from recpipe_serve.batching.forms import Asked


class AnswerServer(ABC):
    """A plugin that also derives from this class stands in front of a served model, as a cache of answers
    does: each request is first put to it. It has no part in training: its ``contribute`` should refuse with a
    ``PluginError`` that says so. Another plugin may keep the package's rows beside it.

    All calls but ``counted`` and ``told`` come from the thread that answers requests, which nothing else is
    answered by meanwhile.
    """

    recpipe_command = "serve"

    @abstractmethod
    def begin(self, scorer: Scorer) -> None:
        """The package of this scorer answers from now on: at the start, when it takes the place of another
        one, and when another version of the same does (a delta; the manifest is equal then). Answers of
        before must not be given any more. ``UserError`` if it cannot be served so."""

    def changed(self, scorer: Scorer, ids: Mapping[int, NDArray[np.int64]]) -> None:
        """Another version of the package answers from now on, whose answers differ from those of the one
        before for requests alone that have one of these ``ids`` of a feature at this place in the manifest:
        rows, or keys where the feature has a map. Unless it is overridden, this is ``begin``."""
        self.begin(scorer)

    def learning(self, ids: Mapping[int, NDArray[np.int64]] | None) -> None:
        """Events are about to be learnt (``learn=true``), by which answers will differ for requests that have
        one of these ``ids``, see ``changed``; None: for any. Until ``learnt``, none of these may be answered
        or completed with what is kept. A class that does not override this is refused with ``learn=true``."""
        raise NotImplementedError(f"{type(self).__name__} does not follow what is learnt")

    def learnt(self, ids: Mapping[int, NDArray[np.int64]] | None) -> None:
        """They have been learnt: answers differ for requests with one of these ``ids``, those of before among
        them; None: for any."""
        raise NotImplementedError(f"{type(self).__name__} does not follow what is learnt")

    @abstractmethod
    def find(self, asked: Asked) -> tuple[NDArray[np.float32] | None, Any]:
        """The scores float32 [N] or [N, T] of a request, which is answered with them; or None, and anything
        by which ``keep`` knows the request again."""

    def lacking(self, asked: Asked, ticket: Any) -> Asked | None:
        """Of a request for which ``find`` gave this ``ticket``, those of its samples that the model is to
        score (``Asked.part``); None: all. ``keep`` is then told of their scores alone."""
        return None

    def completed(self, ticket: Any, scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """The scores of all samples of the request, from those of what was ``lacking``."""
        raise NotImplementedError(f"{type(self).__name__} says what is lacking, and does not complete it")

    @abstractmethod
    def keep(self, ticket: Any, scores: NDArray[np.float32]) -> None:
        """What the model gave for a request for which ``find`` gave this ``ticket`` that is not None. Not
        called for requests that fail. A request that waits while another package takes over may be scored by
        either."""

    @abstractmethod
    def counted(self) -> Mapping[str, float]:
        """Figures by name, always the same ones, for ``/metrics``."""

    @abstractmethod
    def told(self) -> Mapping[str, Any]:
        """What the monitor's page shows, for JSON; under ``off`` why it answers nothing, None if it does."""

    @abstractmethod
    def close(self) -> None:
        """Nothing is asked any more."""
