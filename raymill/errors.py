"""The error that every verb and job prints as one sentence."""


class UserError(Exception):
    """An error that the user can fix. The message says what is wrong, where, and what to do."""

    exit_code = 1
    """Exit code of a verb that fails with this error."""
