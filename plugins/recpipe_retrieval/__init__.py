"""Retrieval with a finished model: ``recpipe index`` writes the candidates' vectors and an index over them,
``recpipe retrieve`` finds the best candidates of queries."""

from recpipe.commands import Command

INDEX = Command(
    "recpipe_retrieval.command:index_command",
    "CHECKPOINT item=COLUMN output=DIRECTORY [kind=flat] [data.path=...]",
    "vectors of all candidates in the data, and an index over them",
)
RETRIEVE = Command(
    "recpipe_retrieval.command:retrieve_command",
    "INDEX output=FILE.parquet [k=10] [keys=[a,b]] [truth=COLUMN] [data.path=...]",
    "the best candidates for each row of any data",
)
