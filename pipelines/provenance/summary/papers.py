"""Writes the papers about a work folder (public summary, cards, Croissant, CycloneDX, SPDX) and checks them again."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gristmill.data_pipeline.annotate.list_file import list_days
from gristmill.foundation.errors import InputError
from gristmill.foundation.files import write_atomic
from gristmill.foundation.fingerprint import digested_json, read_digested_json
from gristmill.foundation.manifest import MANIFEST_NAME, Manifest, read_manifest
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.pipelines.provenance.summary.bills_of_materials import (
    bill_of_materials,
    check_bill,
    check_spdx,
    spdx_document,
)
from gristmill.pipelines.provenance.summary.cards import (
    check_croissant,
    croissant,
    dataset_card,
    model_card,
    public_summary,
)
from gristmill.pipelines.provenance.summary.queries import queries
from gristmill.pipelines.provenance.summary.summary_content import (
    ANSWERS_NAME,
    Content,
    Fact,
    Facts,
    PaperAnswers,
    Reservation,
    answers_form,
    compute_facts,
    differing_facts,
    open_questions,
    read_answers,
)
from gristmill.pipelines.provenance.verify import CROISSANT_NAME, verify
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.recipes.recipe_file import validate
from gristmill.pipelines.workdir.raw_files import lock_raw_files

SUMMARY_NAME = "summary.json"
STAGE_NAMES = ("curate", "tokenizer", "index", "train", "evaluate")
SCHEMAS = {CROISSANT_NAME: check_croissant, "bom.cdx.json": check_bill, "spdx.json": check_spdx}


def write_summary(workdir: Path, output: Path, answers_path: Path | None) -> Content:
    """Writes all papers and the file of answers, unless it is there. Raises InputError if one of them breaks its
    schema, or the work folder has no complete corpus."""
    recipe, stages = _read_stages(workdir)
    path = answers_path or output / ANSWERS_NAME
    names = [source.name for source in recipe.sources]
    answers = read_answers(path, names) if answers_path is not None or path.is_file() else PaperAnswers()
    facts = compute_facts(workdir, queries(bool(answers.small_provider)))
    created = datetime.now(UTC).isoformat(timespec="seconds")
    content = Content(recipe, stages, facts, answers, created, _reservations(recipe, stages["curate"]))
    papers = papers_of(content)
    broken = schema_errors(papers)
    if broken:
        raise InputError("\n".join(broken))
    output.mkdir(parents=True, exist_ok=True)
    for name, document in papers.items():
        write_atomic(paper_path(name, workdir, output), document)
    if not (output / ANSWERS_NAME).is_file():
        write_atomic(output / ANSWERS_NAME, answers_form(names).encode())
    write_atomic(output / SUMMARY_NAME, digested_json(_summary(content)))
    return content


def papers_of(content: Content) -> dict[str, bytes]:
    """The bytes of each paper by file name; equal content gives equal bytes."""
    papers = {
        "public_summary.md": public_summary(content).encode(),
        "dataset_card.md": dataset_card(content).encode(),
        CROISSANT_NAME: croissant(content),
        "bom.cdx.json": bill_of_materials(content),
        "spdx.json": spdx_document(content),
    }
    return papers | ({"model_card.md": model_card(content).encode()} if "train" in content.stages else {})


def paper_path(name: str, workdir: Path, output: Path) -> Path:
    """The file of a paper. Croissant's library reads records below its file's folder alone, so that one stands in the
    work folder."""
    return workdir / name if name == CROISSANT_NAME else output / name


def schema_errors(papers: dict[str, bytes]) -> list[str]:
    return [f"{name}: {error}" for name, check in SCHEMAS.items() for error in check(papers[name])]


def check_summary(workdir: Path, output: Path, engine: Engine) -> list[str]:
    """One line for each difference: raw files from the lock, files of the stages from their manifests, facts computed
    again, papers written again from them, and what their schemas refuse.

    Raises InputError if there is no summary, or it was changed."""
    written, answers, created = _read_summary(output / SUMMARY_NAME)
    recipe, stages = _read_stages(workdir)
    lines = _raw_differences(recipe, workdir, engine)
    lines += verify(workdir).wrong
    if lines:
        return lines  # the files that the queries would read are not those of the summary
    facts = compute_facts(workdir, queries(bool(answers.small_provider)))
    lines += differing_facts(written, facts)
    papers = papers_of(Content(recipe, stages, facts, answers, created, _reservations(recipe, stages["curate"])))
    for name, document in papers.items():
        path = paper_path(name, workdir, output)
        if not path.is_file():
            lines.append(f"{path}: missing; write it with `gristmill summary`")
        elif path.read_bytes() != document:
            lines.append(f"{path}: not what its facts and answers give; write it with `gristmill summary`")
    return lines + schema_errors(papers)


def _raw_differences(recipe: Recipe, workdir: Path, engine: Engine) -> list[str]:
    try:
        lock_raw_files(recipe, workdir, engine, write=False)
    except InputError as error:
        return [str(error)]
    return []


def _reservations(recipe: Recipe, curate: Manifest) -> tuple[Reservation, ...]:
    """The recipe's robots.txt files and opt-outs with their days. Raises InputError for a file that is not the one in
    the lock."""
    locked = {
        file["sha256"] for source in curate.origin["lock"]["sources"] for file in source["files"]
    }  # of all sources and lists
    reservations = []
    for name in ("opt_outs", "robots"):
        for sha256, first, last in list_days(recipe.curate.lists, name):
            if sha256 not in locked:
                raise InputError(
                    f"curate.lists.{name}: {sha256[:16]}... is not in the lock of the corpus; restore the file"
                )
            reservations.append(Reservation(list=name, sha256=sha256, first=first, last=last))
    return tuple(reservations)


def _read_stages(workdir: Path) -> tuple[Recipe, dict[str, Manifest]]:
    """The recipe and the manifests of the complete stages, in order."""
    stages = {name: read_manifest(workdir / name) for name in STAGE_NAMES if (workdir / name / MANIFEST_NAME).is_file()}
    if "curate" not in stages:
        raise InputError(f"{workdir}: no complete stage curate; run `gristmill run RECIPE` first")
    path = workdir / "curate" / MANIFEST_NAME
    return validate(stages["curate"].origin["recipe"], str(path)), stages


def _summary(content: Content) -> dict[str, Any]:
    return {
        "papers": content.fingerprint,
        "created": content.created,
        "recipe": content.recipe.name,
        "stages": {name: manifest.fingerprint for name, manifest in content.stages.items()},
        "facts": [fact.model_dump(mode="json") for fact in content.facts.values()],
        "answers": content.answers.model_dump(mode="json"),
        "open": [list(question) for question in open_questions(content.answers, content.sources)],
    }


def _read_summary(path: Path) -> tuple[Facts, PaperAnswers, str]:
    if not path.is_file():
        raise InputError(f"{path}: no such file; write the papers with `gristmill summary` first")
    try:
        summary = read_digested_json(path.read_bytes())
        facts: Sequence[Fact] = [Fact.model_validate(fact) for fact in summary["facts"]]
        return {fact.name: fact for fact in facts}, PaperAnswers.model_validate(summary["answers"]), summary["created"]
    except (ValueError, KeyError) as error:
        raise InputError(f"{path}: not a summary ({error}); write it again with `gristmill summary`") from error
