"""The arms of an ablation, recipes side by side or one recipe and variations of its fields, and the data of each."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from gristmill.data_pipeline.corpus.splits import document_ranges, read
from gristmill.data_pipeline.decontamination.ngram_index import NgramIndex, build_index, search, words_of
from gristmill.data_pipeline.indexed.config import MixConfig
from gristmill.data_pipeline.indexed.draws import Permutation, key_of
from gristmill.data_pipeline.indexed.mix import CELLS_FOLDER, cell_names, source_cells, write_cells
from gristmill.evaluation.results.ablation import votes
from gristmill.foundation.config import read_yaml
from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.files import atomic_path, write_atomic
from gristmill.foundation.runtime.tasks.engine import Engine
from gristmill.pipelines.ablate.paired_samples import KEYS_FOLDER, write_keys
from gristmill.pipelines.recipes.config import Recipe
from gristmill.pipelines.recipes.recipe_file import load_recipe
from gristmill.tokenizers.config import TokenizerConfig
from gristmill.tokenizers.export import write_huggingface
from gristmill.tokenizers.index_corpus import IndexRequest, index_corpus
from gristmill.tokenizers.tokenizer import MODEL_NAME
from gristmill.tokenizers.train_tokenizer import train
from gristmill.tokenizers.training_sample import training_texts

MIN_MIXED_SOURCES = 2


@dataclass(frozen=True)
class Arm:
    """name: of its folder and in the report. changes: what differs from the recipe, "" where nothing does."""

    name: str
    recipe: Recipe
    changes: str = ""


def arms_of(references: Sequence[str], variations: Sequence[str], overrides: Sequence[str] = ()) -> list[Arm]:
    """The baseline and then the others: a recipe each, or one recipe and an arm for each value of each variation.

    variations: FIELD=VALUE,VALUE; none switches off a field, or the section that cannot do without it. Raises
    RecipeError if fewer than two arms are left, or if arms hold out documents in different ways."""
    recipes = [load_recipe(reference, overrides) for reference in references]
    arms = [Arm(f"arm{number}" if number else "baseline", recipe) for number, recipe in enumerate(recipes)]
    if variations and len(references) != 1:
        raise RecipeError(f"--vary changes one recipe, and {len(references)} are given; leave out the others")
    for variation in variations:
        field, values = parse_variation(variation)
        for value in values:
            recipe, change = _varied(references[0], overrides, field, value)
            if recipe != arms[0].recipe:
                arms.append(Arm(f"arm{len(arms)}", recipe, change))
    if len(arms) < 2:
        raise RecipeError("nothing to compare; give two recipes, or one and --vary FIELD=VALUE,VALUE with other values")
    for arm in arms[1:]:
        check_comparable(arms[0], arm)
    return arms


def parse_variation(text: str) -> tuple[str, list[Any]]:
    """ "curate.near_dedup.threshold=0.7,none" -> ("curate.near_dedup.threshold", [0.7, None])."""
    field, equals, values = text.partition("=")
    if not field or not equals or not values:
        raise RecipeError(f"--vary {text}: write FIELD=VALUE,VALUE, such as curate.near_dedup.threshold=0.7,0.8,none")
    parsed = read_yaml(f"[{values}]", f"--vary {text}", name_lines=False).value
    return field, [None if value == "none" else value for value in parsed]


def _varied(reference: str, overrides: Sequence[str], field: str, value: Any) -> tuple[Recipe, str]:
    def load(path: str) -> tuple[Recipe, str]:
        value_text = "none" if value is None else json.dumps(value)
        return load_recipe(reference, [*overrides, f"{path}={json.dumps(value)}"]), f"{path}: {value_text}"

    try:
        return load(field)
    except RecipeError:
        parent, dot, _ = field.rpartition(".")
        if value is not None or not dot:
            raise
        return load(parent)


def check_comparable(baseline: Arm, arm: Arm) -> None:
    """Raises RecipeError if the arms' models could not be scored on the same held-out documents."""
    for what, of in HELD_OUT_BY.items():
        first, second = of(baseline.recipe), of(arm.recipe)
        if first != second:
            raise RecipeError(
                f"{arm.name} ({arm.recipe.name}) and the baseline cannot be compared: {what} is {second} and {first}; "
                "give both the same"
            )
    objectives = {of.train.objective if of.train is not None else "causal" for of in (baseline.recipe, arm.recipe)}
    if objectives != {"causal"}:
        raise RecipeError(
            f"ablations compare bits per byte of causal models, and an arm trains {', '.join(sorted(objectives))}"
        )


HELD_OUT_BY: Mapping[str, Any] = {
    "seed": lambda recipe: recipe.seed,
    "curate.splits": lambda recipe: recipe.curate.splits.model_dump(),
}


def missing_sources(arms: Sequence[Arm]) -> list[str]:
    """A line for each source that one arm has and another lacks: a difference one should know of."""
    names = [{source.name for source in arm.recipe.sources} for arm in arms]
    everywhere, anywhere = set.intersection(*names), set.union(*names)
    return [
        f"source {name} is in {', '.join(arm.name for arm, own in zip(arms, names, strict=True) if name in own)} alone"
        for name in sorted(anywhere - everywhere)
    ]


def mixed_sources(recipe: Recipe, floors: Mapping[str, float]) -> list[str]:
    """The sources of a mixture. Raises RecipeError if they are too few and not cut into cells, if phases set their
    weights, or if a floor names none of them or all floors together leave nothing to choose."""
    names = [source.name for source in recipe.sources if source.held_out is None]
    if recipe.index.phases:
        raise RecipeError("index.phases sets the weights of the sources; leave it out of a recipe to mix")
    if len(names) < MIN_MIXED_SOURCES and recipe.index.mix is None:
        raise RecipeError(f"{len(names)} source to train on; a mixture needs at least {MIN_MIXED_SOURCES}")
    for name in sorted(name for name in floors if name.partition(".")[0] not in names):
        raise RecipeError(f"--floor {name}: no source has this name; the sources are {', '.join(names)}")
    if sum(floors.values()) > 1 + 1e-9:
        raise RecipeError(f"--floor: the least weights are {sum(floors.values()):g} together; lower them to 1 at most")
    return names


# Data of an ablation: held-out documents that no arm trains on, one tokenizer, an index for each arm.
#
# The held-out documents are those that the arms' curation holds out (a share of each arm's documents, by a hash of
# their text) and the target texts that the user names. A training document with half of its 13-grams, or with half of
# those of a held-out document, is a copy of it, whole or edited: it is taken out of every arm before anything is
# trained.

NGRAM, MIN_NGRAM = 13, 5  # words
COPY_SHARE = 0.5  # of a document's n-grams
MAX_DOCUMENT_BYTES = 4096  # of a held-out document, its beginning
MIN_DOCUMENTS = 30  # of a set to be scored by itself
SAMPLE_BYTES = 4_000_000  # of each arm, for the tokenizer
MIN_VOCABULARY, MAX_VOCABULARY = 384, 4096
MIN_COVERAGE = 0.98  # of characters that have a piece: sentencepiece refuses less
BYTE_AND_CONTROL_PIECES = 258
BYTES_PER_PIECE = 4000  # of the baseline's text: small models spend most of their work on a large vocabulary


@dataclass(frozen=True)
class Texts:
    """Texts that every run scores: the bits of `texts` behind `contexts`, which are "" for documents."""

    texts: tuple[str, ...]
    contexts: tuple[str, ...]

    @property
    def num_bytes(self) -> np.ndarray:
        return np.array([len(text.encode()) for text in self.texts], float)


@dataclass(frozen=True)
class HeldOut:
    """Texts to score. sets: name -> their numbers, such as {"held out of baseline": (0, 1, ...), "target books": ...}.
    tasks: the sets that are questions of a task -> whether the task votes. factors: of each text's bits and bytes where
    a set's bits per byte are taken; none: 1 each."""

    texts: Texts
    sets: dict[str, tuple[int, ...]]
    tasks: dict[str, bool] = field(default_factory=dict)
    factors: tuple[float, ...] = ()

    def scale(self, places: Sequence[int]) -> np.ndarray:
        """float64[places]: the factors of these texts."""
        return np.array(self.factors)[list(places)] if self.factors else np.ones(len(places))

    def as_one(self, name: str) -> "HeldOut":
        """One set of all texts, whose bits per byte are the mean of those of the sets that are large enough."""
        num_bytes, factors = self.texts.num_bytes, np.zeros(len(self.texts.texts))
        for places in self.sets.values():
            if len(places) >= MIN_DOCUMENTS:
                factors[list(places)] += 1 / num_bytes[list(places)].sum()
        used = np.flatnonzero(factors).tolist()
        return HeldOut(self.texts, {name: tuple(used)}, factors=tuple((factors / factors.max()).tolist()))

    @property
    def documents(self) -> tuple[int, ...]:
        """The numbers of the texts that are documents."""
        numbers = {number for name, places in self.sets.items() if name not in self.tasks for number in places}
        return tuple(sorted(numbers))

    def votes(self, set_name: str) -> bool:
        return self.tasks.get(set_name, True)

    def with_tasks(self, questions: Mapping[str, Sequence[tuple[str, str]]]) -> "HeldOut":
        """Adds a set for each task, of (context, right answer)."""
        texts, contexts, sets = list(self.texts.texts), list(self.texts.contexts), dict(self.sets)
        for task, pairs in questions.items():
            sets[f"task {task}"] = tuple(range(len(texts), len(texts) + len(pairs)))
            contexts += [context for context, _ in pairs]
            texts += [answer for _, answer in pairs]
        tasks = {f"task {task}": votes(task) for task in questions}
        return HeldOut(Texts(tuple(texts), tuple(contexts)), sets, tasks)


def read_split(corpus: Path, split: str, sources: Sequence[str]) -> Iterator[str]:
    for source in sources:
        for documents in document_ranges(corpus, split, source):
            yield from read(documents, "text")["text"].to_pylist()


def beginning(text: str) -> str:
    return text.encode()[:MAX_DOCUMENT_BYTES].decode("utf-8", "ignore")


def hold_out(
    arms: Sequence[Arm], corpora: Sequence[Path], targets: Sequence[Path], per_set: int, targets_alone: bool = False
) -> HeldOut:
    """Up to per_set documents of each arm's test split, unless targets_alone, and of each target, in a seeded order;
    equal texts once.

    Raises InputError if no arm and no target has enough of them."""
    groups: dict[str, list[str]] = {}
    for arm, corpus in () if targets_alone else zip(arms, corpora, strict=True):
        sources = [source.name for source in arm.recipe.sources]
        groups[f"held out of {arm.name}"] = list(read_split(corpus, "test", sources))
    for target in targets:
        groups[f"target {target.name}"] = target_texts(target)
    return drawn_groups(groups, per_set)


def drawn_groups(groups: Mapping[str, Sequence[str]], per_set: int) -> HeldOut:
    """The beginnings of up to per_set texts of each group, in a seeded order; equal ones once.

    Raises InputError if no group has enough of them."""
    numbers: dict[str, int] = {}
    sets: dict[str, tuple[int, ...]] = {}
    for name, group in groups.items():
        texts = sorted(set(map(beginning, group)))
        order = Permutation(len(texts), key_of("held out", name)).whole()[:per_set].tolist() if texts else []
        sets[name] = tuple(numbers.setdefault(texts[place], len(numbers)) for place in order)
    if max(map(len, sets.values())) < MIN_DOCUMENTS:
        counts = ", ".join(f"{name} {len(chosen)}" for name, chosen in sets.items())
        raise InputError(
            f"too few held-out documents ({counts}); at least {MIN_DOCUMENTS} are needed: raise curate.splits.test, or "
            "name --target texts"
        )
    return HeldOut(Texts(tuple(numbers), ("",) * len(numbers)), sets)


def target_texts(path: Path) -> list[str]:
    """The `text` of each line of a JSONL file, or the paragraphs of a text file. Raises InputError on other files."""
    try:
        content = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--target {path}: cannot be read as UTF-8 text ({error})") from error
    if path.suffix != ".jsonl":
        return [paragraph for paragraph in content.split("\n\n") if paragraph.strip()]
    texts = []
    for number, line in enumerate(content.splitlines(), start=1):
        try:
            texts.append(str(json.loads(line)["text"]))
        except (ValueError, TypeError, KeyError) as error:
            raise InputError(f"--target {path}: line {number}: no JSON object with a field `text`") from error
    return texts


def write_without_copies(
    corpus: Path, sources: Sequence[str], held_out: HeldOut, folder: Path, mix: MixConfig | None = None
) -> int:
    """Writes FOLDER/documents/train/SOURCE-00000.parquet without copies of held-out documents; returns their number.
    Finished sources are not written again. mix: every cell of its sources is written as a source."""
    wholes = [" ".join(pair) for pair in zip(held_out.texts.contexts, held_out.texts.texts, strict=True)]
    index = build_index(words_of(wholes), NGRAM, MIN_NGRAM)
    copies = 0
    for source in sources:
        path = folder / "documents" / "train" / f"{source}-00000.parquet"
        if not path.is_file():
            kept = _without_copies(corpus, source, index)
            path.parent.mkdir(parents=True, exist_ok=True)
            if mix is not None and (not mix.sources or source in mix.sources):
                _write_by_cell(corpus, source, kept, folder, mix)
            with atomic_path(path) as temporary:
                pq.write_table(kept.select(["doc_id", "text"]), temporary)
        copies += sum(part.documents for part in document_ranges(corpus, "train", source))
        copies -= pq.read_metadata(path).num_rows
    return copies


def _write_by_cell(corpus: Path, source: str, kept: pa.Table, folder: Path, mix: MixConfig) -> None:
    """Buckets are of equally many bytes: tokens are not known before the arms' tokenizer."""
    cells = source_cells(corpus, source, kept, pc.binary_length(kept["text"]).to_numpy(), mix)
    names = cells["cell"].cast(pa.string())
    for name in cell_names(write_cells(folder, source, cells)):
        with atomic_path(folder / "documents" / "train" / f"{name}-00000.parquet") as temporary:
            pq.write_table(kept.select(["doc_id", "text"]).filter(pc.equal(names, name)), temporary)


def _without_copies(corpus: Path, source: str, index: NgramIndex) -> pa.Table:
    kept = [pa.table({name: pa.array([], pa.string()) for name in ("doc_id", "text", "language")})]
    for documents in document_ranges(corpus, "train", source):
        table = read(documents, "doc_id", "text", "language")
        copied = are_copies(index, table["text"].to_pylist())
        kept.append(table.filter(pa.array(~copied)).cast(kept[0].schema))
    return pa.concat_tables(kept)


def are_copies(index: NgramIndex, texts: Sequence[str]) -> np.ndarray:
    """bool[texts]: whether the text shares half of its n-grams, or of an indexed text's, with an indexed text."""
    words = words_of(texts)
    document, ngram, _ = search(index, words)
    copied = np.zeros(len(texts), bool)
    pairs: dict[tuple[int, int], set[int]] = {}
    for text, shared in zip(document.tolist(), ngram.tolist(), strict=True):
        for owner in index.text_of[index.text_first[shared] : index.text_first[shared + 1]].tolist():
            pairs.setdefault((text, owner), set()).add(shared)
    for (text, owner), shared_ngrams in pairs.items():
        smaller = min(int(index.ngrams_of[owner]), max(1, int(words.counts[text]) - NGRAM + 1))
        copied[text] |= len(shared_ngrams) >= COPY_SHARE * smaller
    return copied


def train_tokenizer(
    corpora: Sequence[Path], sources: Sequence[Sequence[str]], seed: int, folder: Path, engine: Engine
) -> None:
    """One tokenizer on the union of the arms, in FOLDER; nothing if it is there. BPE with byte fallback."""
    if (folder / MODEL_NAME).is_file():
        return
    texts: list[str] = []
    num_bytes = 0
    for corpus, names in zip(corpora, sources, strict=True):
        sampled, _ = training_texts(corpus, names, TokenizerConfig(sample_bytes=SAMPLE_BYTES), seed, engine)
        texts += sampled
        num_bytes = num_bytes or sum(len(text.encode()) for text in sampled)
    vocabulary = int(min(MAX_VOCABULARY, max(MIN_VOCABULARY, num_bytes / BYTES_PER_PIECE)))
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / MODEL_NAME, train(texts, tokenizer_settings(texts, vocabulary)))
    write_huggingface(folder)


def tokenizer_settings(texts: Sequence[str], vocabulary: int) -> TokenizerConfig:
    """A vocabulary of this size. Where the characters of many scripts would not leave room for words, the rarer ones
    are encoded as bytes, so that characters take half; it is larger where those below MIN_COVERAGE still take more."""
    settings = TokenizerConfig(vocab_size=vocabulary)
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    shares = np.cumsum(sorted(counts.values(), reverse=True)) / max(1, counts.total())
    free_pieces = vocabulary - BYTE_AND_CONTROL_PIECES
    if len(shares) == 0 or np.searchsorted(shares, settings.character_coverage) + 1 < free_pieces:
        return settings
    coverage = max(MIN_COVERAGE, float(shares[free_pieces // 2 - 1]))
    characters = int(np.searchsorted(shares, coverage)) + 1
    needed = max(vocabulary, BYTE_AND_CONTROL_PIECES + 2 * characters)
    return TokenizerConfig(vocab_size=needed, character_coverage=coverage)


def write_index(corpus: Path, sources: Sequence[str], tokenizer: Path, seed: int, engine: Engine) -> None:
    """Writes CORPUS/index and CORPUS/keys, the documents' keys in the order of the index."""
    if (corpus / "index" / "dataset.json").is_file():
        return
    for source in sources:
        doc_ids: list[str] = []
        for documents in document_ranges(corpus, "train", source):
            doc_ids += read(documents, "doc_id")["doc_id"].to_pylist()
        write_keys(doc_ids, source, seed, corpus / KEYS_FOLDER)
    index_corpus(IndexRequest(corpus, tokenizer, tuple(sources), seed, corpus / "index"), engine)


def sources_with_text(folder: Path, names: Sequence[str]) -> list[str]:
    """Names of the sources whose training text was written to FOLDER; of a source with cells, their names."""
    written = []
    for name in names:
        path = folder / CELLS_FOLDER / f"{name}.parquet"
        written += cell_names(path) if path.is_file() else [name]
    return [name for name in written if document_ranges(folder, "train", name)]
