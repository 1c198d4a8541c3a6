"""The published curation recipes, run from the command line on shared pages."""

import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import yaml

from gristmill.data_pipeline.readers.source import SourceConfig
from gristmill.pipelines.recipes.recipe_file import RECIPES as FOLDER
from gristmill.pipelines.recipes.recipe_file import load_recipe

ROOT = Path(__file__).parents[2]
RECIPES = ("c4", "dclm", "fineweb", "gopher", "refinedweb")


@pytest.mark.parametrize("name", RECIPES)
def test_on_pages_and_on_a_crawl(call, tmp_path, shared_data, name):
    """Twelve articles and a crawl's file of one page: every document has its line in the ledger, and some stay."""
    folder = tmp_path / "pages"
    folder.mkdir()
    pages = sorted(shared_data("html/article_extraction/html").glob("*.html.gz"))[:12]
    for page in pages:
        (folder / page.name).symlink_to(page)
    settings = ("--set", "sources.0.format=html", "--set", f"sources.0.paths=[{folder}/*.html.gz]")
    code, said = call("curate", name, "--workers", 1, *settings, "--workdir", tmp_path / "html")
    assert code == 0, said
    ledger = pq.read_table(tmp_path / "html/curate/ledger")
    assert len(ledger) == len(pages) and "kept" in ledger.column("outcome").to_pylist()


@pytest.mark.parametrize("name", RECIPES)
def test_a_crawl_of_one_page_leaves_a_ledger(call, tmp_path, shared_data, name):
    """The page is too short for every recipe: the run fails, the ledger names the rule, no stage is complete."""
    crawl = shared_data("warc/whirlwind/whirlwind.warc.gz")
    settings = ("--set", "sources.0.format=warc", "--set", f"sources.0.paths=[{crawl}]", "--workdir", tmp_path / "work")
    code, said = call("curate", name, "--workers", 1, *settings)
    (ledger,) = (tmp_path / "work").glob("*curate*/ledger")
    rows = pq.read_table(ledger).to_pylist()
    assert [row["outcome"] for row in rows] == ["kept" if code == 0 else "removed"]
    if code:
        assert code == 1 and "gristmill why" in said.replace("\n", " ")
        assert "incomplete" in call("plan", name, *settings)[1]
        assert rows[0]["rule"] in call("why", rows[0]["doc_id"], "--corpus", ledger.parent)[1]


def test_a_published_recipe_names_its_extractor():
    """The default is not what the papers used."""
    for name in RECIPES:
        for source in yaml.safe_load((FOLDER / f"{name}.yaml").read_text())["sources"]:
            assert SourceConfig.model_validate(source).has_html == ("extractor" in source), name


NUMBERS = re.findall(
    r"^\| `(\w+)` \| `(\w+)\.(\w+)` \| ([\d.]+) \|", (ROOT / "docs" / "curation.md").read_text("utf-8"), re.M
)


@pytest.mark.parametrize("recipe, section, field, number", NUMBERS)
def test_the_page_names_the_numbers_of_the_recipes(recipe, section, field, number):
    curate = load_recipe(recipe).curate
    filters = {choice.preset: choice.thresholds for choice in curate.filters}
    value = filters[section][field] if section in filters else getattr(getattr(curate, section), field)
    assert float(value) == float(number)


def test_every_recipe_of_a_published_corpus_is_in_the_table():
    assert {row[0] for row in NUMBERS} == {"c4", "gopher", "fineweb", "refinedweb", "dclm"} and len(NUMBERS) > 20
