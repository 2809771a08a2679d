"""A package behind HTTP by the open inference protocol (KServe v2): ``recpipe serve``."""

from typing import TYPE_CHECKING

from recpipe.commands import Command
from recpipe.common.process import lazily
from recpipe_serve.answer_server import AnswerServer
from recpipe_serve.row_server import RowServer

if TYPE_CHECKING:
    from recpipe.answers.reference import read_lookups
    from recpipe.answers.score import ALIGNMENT, Lookup, PackageError, Scorer, Tables, offsets_of, tensors
    from recpipe.answers.score import Call as LookupCall
    from recpipe.common.device import keep_to_one_core, one_thread
    from recpipe_serve.batching.forms import Asked

SERVE = Command(
    "recpipe_serve.command:serve_command",
    "PACKAGE [port=8000] [trust=PUBKEY] [+plugin=sdm]",
    "a package behind HTTP, by the open inference protocol",
)

DEPLOY = Command(
    "recpipe_serve.deploy.command:deploy_command",
    "PACKAGE DIRECTORY for=triton|torchserve|kserve|onnx",
    "a package, laid out for another server",
)

NAMES = {
    "ALIGNMENT": "recpipe.answers.score:ALIGNMENT",
    "AnswerServer": "recpipe_serve.answer_server:AnswerServer",
    "Asked": "recpipe_serve.batching.forms:Asked",
    "Lookup": "recpipe.answers.score:Lookup",
    "LookupCall": "recpipe.answers.score:Call",
    "PackageError": "recpipe.answers.score:PackageError",
    "RowServer": "recpipe_serve.row_server:RowServer",
    "Scorer": "recpipe.answers.score:Scorer",
    "Tables": "recpipe.answers.score:Tables",
    "keep_to_one_core": "recpipe.common.device:keep_to_one_core",
    "offsets_of": "recpipe.answers.score:offsets_of",
    "one_thread": "recpipe.common.device:one_thread",
    "read_lookups": "recpipe.answers.reference:read_lookups",
    "tensors": "recpipe.answers.score:tensors",
}
"""What this package offers to plugins that keep a served package's rows or its answers, once in
``recpipe.kit`` and ``recpipe.plugin``.

It is imported when it is first used: the help, which shows the command, must not wait for torch.
"""

__all__ = [
    "ALIGNMENT",
    "AnswerServer",
    "Asked",
    "Lookup",
    "LookupCall",
    "PackageError",
    "RowServer",
    "Scorer",
    "Tables",
    "keep_to_one_core",
    "offsets_of",
    "one_thread",
    "read_lookups",
    "tensors",
]

__getattr__ = lazily(__name__, NAMES)
