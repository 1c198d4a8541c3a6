"""Generation defaults of a published model: its generation_config.json."""

import json
from pathlib import Path
from typing import Any, Self

from pydantic import Field, ValidationError

from gristmill.foundation.config import Config
from gristmill.foundation.errors import InputError

GENERATION_NAME = "generation_config.json"
SAMPLING_FIELDS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


class GenerationDefaults(Config):
    """Fields that the publisher states; None where it states nothing. do_sample: draw tokens where the caller does not
    say how; else greedy, as in transformers."""

    do_sample: bool = False
    temperature: float | None = Field(None, ge=0.0)
    top_k: int | None = Field(None, ge=1)
    top_p: float | None = Field(None, gt=0.0, le=1.0)
    min_p: float | None = Field(None, ge=0.0, le=1.0)
    repetition_penalty: float | None = Field(None, gt=0.0)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Defaults of a model or tokenizer folder; none without the file. Raises InputError for invalid values."""
        path = folder / GENERATION_NAME
        if not path.is_file():
            return cls()
        try:
            fields = json.loads(path.read_bytes())
            stated = {name: fields[name] for name in cls.model_fields if fields.get(name) is not None}
            return cls(**{name: value for name, value in stated.items() if (name, value) != ("top_k", 0)})
        except ValidationError as error:
            problem = error.errors()[0]
            raise InputError(
                f"{path}: {problem['loc'][0]}: {problem['msg']}; correct the field or fetch the file again"
            ) from error
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise InputError(f"{path}: not JSON with fields ({error}); fetch the file again") from error

    def sampling_fields(self, temperature: float | None = None, **given: Any) -> dict[str, Any]:
        """Fields of a SamplingConfig as the caller asks and, where it does not, as the publisher states.

        temperature: None is the publisher's where it samples, else 0 (greedy)."""
        if temperature is None:
            temperature = (self.temperature or 1.0) if self.do_sample else 0.0
        fields = {name: getattr(self, name) for name in SAMPLING_FIELDS[1:]}
        fields |= {name: value for name, value in given.items() if value is not None}
        return {"temperature": temperature, **{name: value for name, value in fields.items() if value is not None}}
