"""A conversation with one model, turn by turn, streamed."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gristmill.evaluation.convert.chat_template import ChatTemplate
from gristmill.evaluation.inference.config import EvaluateConfig, SamplingConfig
from gristmill.evaluation.inference.generate.prompts import generate
from gristmill.evaluation.inference.generate.request import GenerationSettings
from gristmill.evaluation.inference.load import LoadedModel, load_for_evaluation
from gristmill.evaluation.inference.workdir import CheckpointPaths


@dataclass
class Conversation:
    """messages: what was said so far. A template without stops of its own is a chat model's; the plain one is not
    used: a base model goes on with the text as it stands."""

    loaded: LoadedModel
    template: ChatTemplate
    settings: GenerationSettings
    system: str = ""
    messages: list[dict[str, str]] = field(default_factory=list)
    text: str = ""

    @property
    def name(self) -> str:
        kind = "a chat model" if self.is_chat else "a base model: it goes on with what you write"
        return f"{self.loaded.name}, {kind}"

    @property
    def is_chat(self) -> bool:
        return not self.template.is_plain

    def answer(self, line: str, write: Callable[[str], None]) -> str:
        """Streams the answer to `write` and returns it. What no longer fits the model's context is forgotten, the
        oldest first."""
        prompt = self._prompt(line)
        room = self.loaded.causal_lm.sequence_length - 1
        while len(prompt) > room // 2 and len(self.messages) > 2:
            del self.messages[:2]
            prompt = self._rendered()
        prompt = prompt[-max(1, room - min(self.settings.max_new_tokens, room // 2)) :]
        (generation,) = generate(
            self.loaded.causal_lm, self.loaded.tokenizer, [prompt], self.settings, stream=lambda _, text: write(text)
        )
        said = self.loaded.tokenizer.decode(list(generation.tokens))
        self.messages.append({"role": "assistant", "content": said})
        self.text += said
        return said

    def _prompt(self, line: str) -> list[int]:
        self.messages.append({"role": "user", "content": line})
        self.text += ("\n" if self.text else "") + line
        return self._rendered()

    def _rendered(self) -> list[int]:
        if not self.is_chat:
            return list(self.loaded.tokenizer.encode_prompt(self.text))
        first = [{"role": "system", "content": self.system}] if self.system else []
        return self.loaded.tokenizer.encode_chat(self.template.render([*first, *self.messages]), self.template)


TEMPERATURE = 0.8  # where neither the caller nor the publisher says one


def load_chat(folder: Path, system: str, temperature: float | None, max_tokens: int, seed: int) -> Conversation:
    """temperature: None is the publisher's. Raises InputError or RecipeError where the folder holds no model."""
    loaded = load_for_evaluation(CheckpointPaths(folder, None), EvaluateConfig())
    defaults = loaded.tokenizer.generation
    if temperature is None and not defaults.do_sample:
        temperature = TEMPERATURE
    settings = GenerationSettings(max_tokens, SamplingConfig(**defaults.sampling_fields(temperature, seed=seed)))
    return Conversation(loaded, loaded.tokenizer.chat_template(), settings, system)
