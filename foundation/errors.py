"""The two exceptions for user errors. Any other exception is a bug and shows a traceback."""


class RecipeError(Exception):
    """The command or the recipe is wrong; no work was started. The command line exits with 2."""


class InputError(Exception):
    """The work failed on its input or environment: a file, a record, a disk. The command line exits with 1."""
