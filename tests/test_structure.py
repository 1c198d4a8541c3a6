"""The structure of the code in docs/architecture.md: layers, no cycles, packages, torch-free folders, retired names."""

import ast
import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import naming
import pytest

ROOT = Path(__file__).parent.parent
LAYERS = {"foundation": 0, "data_pipeline": 1, "training": 2, "tokenizers": 2, "evaluation": 3, "pipelines": 4}
FILES = sorted(path for folder in LAYERS for path in (ROOT / folder).rglob("*.py"))
MAX_ARROWS = 60  # between the subfolders and files of a top-level folder
TORCH_FREE = (
    "foundation/",
    "data_pipeline/",
    "tokenizers/",
    "training/config/",
    "training/planner/",
    "training/objectives/objective_names.py",
    "evaluation/inference/config.py",
)


# Retired name -> what replaces it, searched as whole words in code and documentation.
RETIRED = {
    "AnswerCache": "RequestCache",
    "ByteCodec": "ByteTokenizer",
    "Carrier": "TaskTransport",
    "CheckpointEvaluation": "EvaluatedModel and TaskOptions",
    "CuratedSource": "SourceState",
    "EndOptions": "StopOptions",
    "FilePart": "FileRange",
    "GeneratingModel": "GenerationModelOptions",
    "JudgedSource": "ScoredSource",
    "KVCache": "KVSlots",
    "KeyValueState": "KVSlots",
    "KnownDigests": "DigestCache",
    "LaterStep": "RemovalStep",
    "LiveModel": "ModelInTraining",
    "LiveScores": "InTrainingScores",
    "LiveSources": "InTrainingSources",
    "ModelCard": "SavedModelConfig",
    "ModelParts": "LocalModel",
    "Parcel": "PickledValue",
    "PieceCodec": "VocabularyInfo",
    "PinnedList": "LockedList",
    "PinnedProfiles": "LockedProfiles",
    "PinnedRobots": "LockedRobots",
    "StorePart": "SignatureShard",
    "Tallies": "OutcomeCounts",
    "Tally": "DocumentCounts",
    "TrainedBits": "ModelBitsPerByte",
    "Verdicts": "FilterResults",
    "_agree": "count_valid_tokens",
    "_heard_by": "_local_rank",
    "accuracy_verdict": "accuracy_chance_test",
    "around_mixing": "around_token_mixing",
    "check_live": "check_in_training",
    "choose_passes": "build_forward_backward",
    "cut_by_weight": "WeightRuns",
    "data_groups": "axis_groups",
    "decide_all": "apply_filters_to_files",
    "disk_trouble": "explain_disk_error",
    "do_without_pandas": "block_pandas_import",
    "evaluate_live": "evaluate_in_training",
    "fastest_equal": "fastest_verified_encoder",
    "fastest_on": "fastest_matching_encoder",
    "fit_error": "the error computed where it is used",
    "foretell": "forecast",
    "foretold": "forecast",
    "form_of": "sample_format",
    "found_in_corpus": "contaminated_questions",
    "half_done": "incomplete",
    "held_folder": "locked_temp_dir",
    "hidden_modules": "block_imports",
    "is_sealed": "matches_checksum",
    "keep_loaded": "freeze_loaded_modules",
    "kept_array": "cached_array",
    "kept_sha256": "cached_sha256",
    "last_words": "log_tail",
    "layout.cuts": "layout.split_points",
    "least_bytes": "min_bytes",
    "least_characters": "min_characters",
    "least_count": "min_count",
    "least_microbatches": "min_microbatches",
    "link_sealed": "link_with_checksum",
    "live_causal_lm": "causal_lm_in_training",
    "living_parts": "kept_document_files",
    "load_codec": "load_checkpoint_tokenizer",
    "load_subject": "load_for_evaluation",
    "measure_again": "reannotate",
    "mirror_of": "local_mirror",
    "name_of": "task_name",
    "newest_whole": "newest_complete",
    "no_json": "invalid_json",
    "objections": "validation_errors",
    "open_form": "open_format",
    "open_source": "open_weights",
    "own_device": "local_device",
    "packed_below": "pickle_relative_to",
    "pinned_labels": "locked_labels",
    "pinned_list": "locked_list",
    "pinned_scores": "locked_scores",
    "pronoun": "plural_pronoun",
    "raise_all": "raise_issues",
    "read_slice": "read_rows",
    "refuse_twins": "check_unique_ids",
    "remove_seals": "remove_checksums",
    "rubble": "incomplete, or temporary files",
    "same_ids": "encodes_identically",
    "seal_of": "checksum_path",
    "sealed_path": "checksummed_path",
    "sign_verdict": "sign_chance_test",
    "stage_fingerprint": "StageIdentity.fingerprint",
    "strings_for": "verification_strings",
    "taken_by": "failed_rule",
    "text_no_string": "text_not_string",
    "tidied": "strip_blank_space",
    "to_ours": "from_hf",
    "to_the_end": "train",
    "to_theirs": "to_hf",
    "train.watch": "train.monitoring",
    "twin_cut": "sharded_table",
    "unheard": "no_callback",
    "write_sealed": "write_with_checksum",
}


def module_name(path: Path) -> str:
    return "gristmill." + ".".join(path.relative_to(ROOT).with_suffix("").parts)


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


@cache
def imports(path: Path, inside_functions: bool = False) -> frozenset[str]:
    """Names that `import` and `from` statements import when the file is imported, and its deferred modules.

    `inside_functions` adds those inside functions. Does not count the code under `if __name__ == "__main__"`."""
    found = set()
    waiting: list[ast.AST] = list(parsed(path).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "DeferredModule":
            found |= {each.value for each in node.args if isinstance(each, ast.Constant)}
        elif isinstance(node, ast.If) and "__main__" in ast.unparse(node.test):
            continue
        elif inside_functions or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            waiting += list(ast.iter_child_nodes(node))
    return frozenset(found)


MODULES = {module_name(path): path for path in FILES}


def modules_of(names: frozenset[str]) -> set[str]:
    """Our modules among the imported names; `gristmill.a.b.Name` counts as `gristmill.a.b`."""
    return {name if name in MODULES else name.rpartition(".")[0] for name in names if name.startswith("gristmill.")}


def find_cycle(graph: Mapping[str, set[str]]) -> list[str]:
    """A cycle as [a, b, ..., a], found depth first; [] if there is none."""
    done: set[str] = set()

    def visit(node: str, trail: tuple[str, ...]) -> list[str]:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in done:
            return []
        done.add(node)
        for target in sorted(graph.get(node, ())):
            if cycle := visit(target, (*trail, node)):
                return cycle
        return []

    for node in sorted(graph):
        if cycle := visit(node, ()):
            return cycle
    return []


def folder_graph(top: str, top_files_are_one: bool = False) -> dict[str, set[str]]:
    """Imports between the nodes of a top-level folder: its subfolders and the files at its top."""

    def node(path: Path) -> str:
        parts = path.relative_to(ROOT / top).parts
        return "" if top_files_are_one and len(parts) == 1 else parts[0]

    own = {name: path for name, path in MODULES.items() if path.is_relative_to(ROOT / top)}
    graph: dict[str, set[str]] = {node(path): set() for path in own.values()}
    for path in own.values():
        targets = {node(own[name]) for name in modules_of(imports(path, inside_functions=True)) if name in own}
        graph[node(path)] |= targets - {node(path)}
    return graph


def test_no_init_files():
    """One in tokenizers/ would make `import tokenizers` load our folder instead of Hugging Face's package."""
    assert [str(path) for folder in LAYERS for path in (ROOT / folder).rglob("__init__.py")] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_import_points_up(path):
    own = path.relative_to(ROOT).parts[0]
    for name in imports(path, inside_functions=True):
        parts = name.split(".")
        if parts[0] != "gristmill":
            assert parts[0] not in LAYERS or parts[0] == "tokenizers", f"{name}: write gristmill.{name}"
            continue
        other = parts[1]
        assert other == own or LAYERS[other] < LAYERS[own], (
            f"{path.relative_to(ROOT)} imports {name}, which is in a higher layer"
        )


def test_find_cycle_on_small_graphs():
    assert find_cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]


def test_no_cycle_between_files():
    assert find_cycle({name: modules_of(imports(path)) for name, path in MODULES.items()}) == []


@pytest.mark.parametrize("top", LAYERS)
def test_no_cycle_between_folders(top):
    """Subfolders and top-level files of each top-level folder form an order, with few arrows; so do the subfolders and
    all top-level files as one."""
    graph = folder_graph(top)
    assert find_cycle(graph) == find_cycle(folder_graph(top, top_files_are_one=True)) == []
    assert sum(len(targets) for targets in graph.values()) <= MAX_ARROWS


def test_the_order_of_pipelines_is_that_of_the_page():
    page = (ROOT / "docs/architecture.md").read_text("utf-8").partition("`pipelines/`, from the top")[2]
    order = re.findall(r"`(\w+(?:/|\.py))`", page.partition("`tests/`")[0])
    rooms = [name.strip("/") for name in order if name.endswith("/") or name == "python_api.py"]
    rooms = [name for name in dict.fromkeys(rooms) if name not in ("forget", "summary")]
    graph = folder_graph("pipelines")
    assert set(rooms) == set(graph)
    for room, targets in graph.items():
        assert all(rooms.index(target) > rooms.index(room) for target in targets), room


def test_every_import_of_ours_names_a_file():
    for module, path in MODULES.items():
        missing = modules_of(imports(path, inside_functions=True)) - set(MODULES)
        assert missing == set(), f"{module} imports {sorted(missing)}: no such file"


def test_packages_listed_are_the_tree():
    """A package that is not listed imports from an editable install and is missing from the wheel."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    listed = set(project["tool"]["setuptools"]["packages"])
    tree = {name.rpartition(".")[0] for name in MODULES}
    tree |= {
        f"gristmill.{path.parent.relative_to(ROOT).as_posix().replace('/', '.')}"
        for folder in LAYERS
        for path in (ROOT / folder).rglob("*.yaml")
    }
    assert listed == tree | {"gristmill"}  # the package root, whose names are the Python interface


def test_torch_free_files_import_no_torch():
    for path in FILES:
        relative = path.relative_to(ROOT).as_posix()
        if relative.startswith(TORCH_FREE):
            roots = {name.split(".")[0] for name in imports(path)}
            assert "torch" not in roots, f"{relative} imports torch"


MAX_PARAMETERS = 6
# Functions with more: numba kernels take flat arrays; the others have the parameters of a format that is not ours.
EXEMPT = {"evaluation/tasks/loaders.py": "load"}  # the dataset_kwargs of lm-eval's task files


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    names = [argument.arg for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


@pytest.mark.parametrize("top", LAYERS)
def test_functions_have_at_most_six_parameters(top):
    """More are grouped in a value that has a name."""
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name} has {len(parameters(node))} parameters"
        for path in (ROOT / top).rglob("*.py")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and len(parameters(node)) > MAX_PARAMETERS
        and not any("njit" in ast.unparse(decorator) for decorator in node.decorator_list)
        and EXEMPT.get(path.relative_to(ROOT).as_posix()) != node.name
    ]
    assert found == []


def test_no_retired_names():
    pattern = re.compile(r"(?<!\w)(" + "|".join(RETIRED) + r")(?!\w)")
    folders = [*LAYERS, "benchmarks", "docs", "tests"]
    paths = [
        path for folder in folders for ending in ("py", "md", "yaml") for path in (ROOT / folder).rglob(f"*.{ending}")
    ]
    found = [
        f"{path.relative_to(ROOT)}:{number}: {match[1]}: write {RETIRED[match[1]]}"
        for path in [*paths, ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
        if path != Path(__file__)
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        for match in pattern.finditer(line)
    ]
    assert found == []


def test_all_dependencies_are_pinned():
    """A dependency without a pin would install the newest version of the day."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pinned = {
        line.split("==")[0].strip().lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    required = project["dependencies"] + project["optional-dependencies"]["test"]
    names = {
        requirement.split(">")[0].split("<")[0].split("=")[0].split("[")[0].lower().replace("_", "-")
        for requirement in required
    }
    assert names - pinned == set()


def test_a_vague_name_is_told(tmp_path):
    (tmp_path / "one.py").write_text(
        '"""What it does."""\n\nclass Layer: ...\n\n'
        'def initialise(each):\n    """Of it."""\n    for found in each: ...\n'
    )
    (tmp_path / "two.py").write_text("class Layer: ...\n")
    told = [(str(path), line, message.split(":")[0]) for path, line, message in naming.faults(["."], tmp_path)]
    assert told == [
        ("one.py", 1, "a docstring begins with 'What'"),
        ("one.py", 5, "a value is called each"),
        ("one.py", 5, "initialise"),
        ("one.py", 6, "a docstring begins with 'Of'"),
        ("one.py", 7, "a value is called found"),
        ("two.py", 1, "class Layer is in one.py too"),
    ]


@cache
def defined_names(path: Path) -> frozenset[str]:
    """Names that a file defines, imports or binds, at any depth."""
    names: set[str] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Name):
            names.add(node.id)
    return frozenset(names)


def test_every_imported_name_exists():
    """Also in benchmarks, which no test imports, and inside functions."""
    missing = []
    for path in [*FILES, *(ROOT / "tests").rglob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        for name in imports(path, inside_functions=True):
            module, _, member = name.rpartition(".")
            if module in MODULES and member not in defined_names(MODULES[module]):
                missing.append(f"{path.relative_to(ROOT)}: {module} has no {member}")
    assert missing == []
