"""Paths in a work folder: the folders of its stages, its checkpoints and its tokenizer."""

from dataclasses import dataclass
from pathlib import Path

from gristmill.foundation.errors import InputError
from gristmill.foundation.manifest import MANIFEST_NAME, Manifest, read_manifest
from gristmill.training.checkpoint.checkpoint import TRANSFORMERS, step_folder, steps_in

MODEL_STAGES = ("curate", "tokenizer", "index", "train")  # the stages a model is made by, in order


@dataclass(frozen=True)
class HeldOutCorpus:
    """Folders of the stages `curate` and `index`, which held-out tasks are built from. seed: the recipe's."""

    curate: Path
    index: Path
    seed: int


@dataclass(frozen=True)
class CheckpointPaths:
    """checkpoint: a step's folder, a run (its newest step), or a Hugging Face folder.

    tokenizer: its folder; None looks in the checkpoint's folder and in the work folder."""

    checkpoint: Path
    tokenizer: Path | None = None

    def resolve(self) -> tuple[Path, Path]:
        """(folder of the checkpoint, folder of the tokenizer). Raises InputError if one is absent."""
        checkpoint = find_checkpoint(self.checkpoint)
        folder = self.tokenizer or find_tokenizer(checkpoint)
        if not folder.is_dir():
            raise InputError(f"{folder}: no such folder; name the tokenizer the checkpoint was trained with")
        return checkpoint, folder


@dataclass(frozen=True)
class Workdir:
    """The work folder of a run: one folder for each stage."""

    root: Path

    @classmethod
    def of_checkpoint(cls, checkpoint: Path) -> "Workdir | None":
        """ROOT/train/checkpoints/step-00000100 -> ROOT. None for a checkpoint outside of a work folder."""
        checkpoints = checkpoint.resolve().parent
        if (checkpoints.parent.name, checkpoints.name) != ("train", "checkpoints"):
            return None
        return cls(checkpoints.parents[1])

    def stage(self, name: str) -> Path:
        return self.root / name

    def is_complete(self, stage: str) -> bool:
        return (self.stage(stage) / MANIFEST_NAME).is_file()

    def manifests(self) -> dict[str, Manifest]:
        """Manifests of the complete stages that the model depends on, in order."""
        return {name: read_manifest(self.stage(name)) for name in MODEL_STAGES if self.is_complete(name)}

    def held_out_corpus(self) -> HeldOutCorpus | None:
        """None unless the stages `curate` and `index` are complete."""
        if not (self.is_complete("curate") and self.is_complete("index")):
            return None
        recipe = read_manifest(self.stage("curate")).origin.get("recipe", {})
        return HeldOutCorpus(self.stage("curate"), self.stage("index"), int(recipe.get("seed", 0)))


def checkpoints_folder(path: Path) -> Path | None:
    """The folder of step-*: PATH itself, or the one in an imported model, a stage `train` or a work folder."""
    folders = (path, path / "checkpoints", path / "train" / "checkpoints")
    return next((folder for folder in folders if steps_in(folder)), None)


def find_checkpoint(path: Path) -> Path:
    """The newest checkpoint in PATH, or PATH itself if it is a checkpoint or a Hugging Face folder; of a run on a model
    of transformers the folder that it wrote."""
    folder = checkpoints_folder(path)
    if folder is not None and (folder.parent / TRANSFORMERS / "config.json").is_file():
        return folder.parent / TRANSFORMERS
    if folder is not None:
        return step_folder(folder, steps_in(folder)[-1])
    if not path.is_dir():
        raise InputError(f"{path}: no such folder; name a folder like checkpoints/step-00000100")
    return path


def find_tokenizer(checkpoint: Path) -> Path:
    """The folder itself (Hugging Face), or `tokenizer` in one of the three folders above. Raises InputError if none."""
    candidates = [checkpoint, *(parent / "tokenizer" for parent in checkpoint.resolve().parents[:3])]
    for folder in candidates:
        if (folder / "tokenizer.model").is_file() or (folder / "tokenizer.json").is_file():
            return folder
    raise InputError(
        f"{checkpoint}: no tokenizer in its folder or its run; name the tokenizer's folder with --tokenizer"
    )
