"""What the server of tests/processes.py does before it forks the first process: imports, above all, and what
a process does once, such as the types of a recipe's keys and the report's template.

Reports of its processes have empty plots; those of processes from the beginning have real ones.
"""

import os

from recpipe.common.process import calm_threads

calm_threads()  # before torch is imported, as the command line does

import pytest  # noqa: E402

import recpipe.report.html  # noqa: E402
import recpipe.report.run_page  # noqa: E402
import recpipe.report.run_table  # noqa: E402
import recpipe.run  # noqa: E402
import recpipe.tasks.compare  # noqa: E402
import recpipe.tasks.doctor  # noqa: E402
import recpipe.tasks.plugins  # noqa: E402
import recpipe.tasks.sweep_launcher  # noqa: E402
import tests.any_model.zoo  # noqa: E402, F401
from recpipe.common.loops import load_loops  # noqa: E402
from recpipe.common.process import keep_all  # noqa: E402
from recpipe.config.compose import compose  # noqa: E402
from recpipe.config.recipe import Recipe  # noqa: E402
from recpipe.plugin.load import installed  # noqa: E402
from recpipe.report.environment import _commit  # noqa: E402
from recpipe.testing.process import libraries  # noqa: E402
from tests import composing  # noqa: E402
from tests.arguments import leave_environment  # noqa: E402
from tests.drawing import leave_blank  # noqa: E402
from tests.meta import leave_undrawn  # noqa: E402
from tests.pretend_gpu import cuda  # noqa: E402
from tests.proposals import propose_few  # noqa: E402

if os.environ.get("RECPIPE_GPU_SUITE") == "pretend":
    cuda.install()
load_loops()
leave_blank(pytest.MonkeyPatch())  # for good
leave_undrawn(pytest.MonkeyPatch())
leave_environment(pytest.MonkeyPatch())
propose_few(pytest.MonkeyPatch())
composing.remember_parts(pytest.MonkeyPatch())
libraries()  # as they are before plugins are imported
for plugin in installed().values():
    plugin.load()
load_loops()  # the plugins'
Recipe.of(compose(["optim=sgd", "tiers=ssd", "+plugin=hotline"]))  # Hydra looks for its plugins, once
recpipe.report.html.template()
_commit()  # asks git, once
keep_all()  # the processes need not look at all this, which would copy its pages
