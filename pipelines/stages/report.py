"""The stage `report`: one page on curation, training and evaluation, as Markdown and self-contained HTML."""

from typing import Any

from gristmill.foundation.files import write_atomic
from gristmill.foundation.manifest import LOG_FOLDER
from gristmill.foundation.startup import DeferredModule
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.stages.stage import Stage, StageContext, run_as_script

# The command imports every stage; these parts are imported by a run of this one.
content = DeferredModule("gristmill.pipelines.report.content")
html = DeferredModule("gristmill.pipelines.report.render")
markdown = DeferredModule("gristmill.pipelines.report.render")


def config(recipe: Recipe) -> dict[str, Any]:
    return {"name": recipe.name, "weights": recipe.source_weights}


def run(context: StageContext) -> dict[str, Any]:
    """Writes report.md, report.html and figures/*.svg, and in logs, which no manifest lists, the page with times."""
    folders = content.Folders(**{name: folder for name, folder in context.inputs.items()})
    blocks = content.report_blocks(context.recipe, folders)
    figures = [block for block in blocks if isinstance(block, content.Figure)]
    for figure in figures:
        write_atomic(context.folder / "figures" / f"{figure.name}.svg", figure.svg)
    write_atomic(context.folder / "report.md", markdown.to_markdown(blocks).encode())
    write_atomic(context.folder / "report.html", html.to_html(f"gristmill: {context.recipe.name}", blocks).encode())
    if timed := content.timed_blocks(blocks, folders):
        page = html.to_html(f"gristmill: {context.recipe.name}", timed)
        write_atomic(context.folder / LOG_FOLDER / "report.html", page.encode())
        write_atomic(context.folder / LOG_FOLDER / "report.md", markdown.to_markdown(timed).encode())
    return {"figures": len(figures)}


STAGE: Stage = Stage(
    name="report",
    code_version=10,
    inputs=("curate", "tokenizer", "index", "train", "evaluate"),
    config=config,
    run=run,
    sections=("model", "train"),
    libraries=("matplotlib",),
)

if __name__ == "__main__":
    run_as_script("report")
