"""What went wrong, said to a user: the command line prints the message and exits with status 2."""


class UserError(Exception):
    """A mistake in a recipe, a file or a machine's set-up; the message names it and the remedy."""


class DataError(UserError):
    """Bad input data; the message names file, row, column and value where they are known."""


class StoreError(UserError):
    """A cold store that cannot be used: read-only or full disk, torn rows, a crashed run's leftovers."""


class CheckpointError(UserError):
    """A checkpoint that cannot be written."""


class ThroughHydra(BaseException):
    """Carries a user's error through Hydra, which catches ``Exception`` and would print around it."""

    def __init__(self, error: UserError) -> None:
        super().__init__(str(error))
        self.error = error
