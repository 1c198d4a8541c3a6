"""The two ways a user can be told that something is wrong. Anything else is our bug and shows a traceback."""


class RecipeError(Exception):
    """The call or the recipe is wrong, and nothing was started. The command line exits with 2."""


class InputError(Exception):
    """The work failed on what it was given: a file, a record, a disk. The command line exits with 1."""
