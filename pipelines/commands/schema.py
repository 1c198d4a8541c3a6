"""The command `schema`."""

import json

from gristmill.pipelines.schema import recipe_schema


def schema() -> None:
    """Print the JSON schema of recipes, for editors."""
    print(json.dumps(recipe_schema(), indent=2))
