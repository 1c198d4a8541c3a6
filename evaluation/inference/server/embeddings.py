"""`POST /v1/embeddings`: final hidden states of texts, pooled over their tokens."""

import asyncio
import base64
from typing import Any, Literal, Self

import numpy as np
from pydantic import field_validator, model_validator
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gristmill.evaluation.inference.generate.request import GenerationRequest, GenerationSettings
from gristmill.evaluation.inference.server.model_calls import (
    HttpError,
    ServedModel,
    checked,
    completed,
    ignored_header,
    read_body,
)
from gristmill.evaluation.inference.server.openai_api import MAX_PROMPTS
from gristmill.foundation.config import Config


class EmbeddingRequest(Config):
    """input: texts or token ids, one or several. dimensions: those of the model, if given. pooling: mean of the hidden
    states of all tokens, or that of the last. normalize: to length 1, as OpenAI's are."""

    input: list[str | list[int]]
    model: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    pooling: Literal["mean", "last"] = "mean"
    normalize: bool = True

    @model_validator(mode="before")
    @classmethod
    def null_is_the_default(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}

    @field_validator("input", mode="before")
    @classmethod
    def one_input_is_a_list(cls, value: Any) -> Any:
        is_one = isinstance(value, str) or (isinstance(value, list) and value and isinstance(value[0], int))
        return [value] if is_one else value

    @model_validator(mode="after")
    def has_some_inputs(self) -> Self:
        if not 0 < len(self.input) <= MAX_PROMPTS:
            raise ValueError(f"input has {len(self.input)} texts; give 1 to {MAX_PROMPTS}")
        return self


async def embed(model: ServedModel, request: Request) -> Response:
    stated: tuple[EmbeddingRequest, list[str]] = checked(model, EmbeddingRequest, await read_body(request))
    fields, ignored = stated
    width = model.engine.embedding_width
    if width is None:
        raise HttpError(400, f"{model.name} runs in transformers' code, which gives no hidden states; serve another")
    if fields.dimensions not in (None, width):
        raise HttpError(400, f"dimensions is {fields.dimensions}; this model's embeddings have {width}: leave it out")
    prompts = await asyncio.to_thread(lambda: [model.encode_prompt(text) for text in fields.input])
    settings = GenerationSettings(0, pooling=fields.pooling)
    results = await completed(model, request, [GenerationRequest(tuple(prompt), settings) for prompt in prompts])
    vectors = [result.embedding for result in results if result.embedding is not None]
    entries = [
        {"object": "embedding", "index": index, "embedding": encoded(vector_D, fields)}
        for index, vector_D in enumerate(vectors)
    ]
    tokens = sum(map(len, prompts))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    body = {"object": "list", "data": entries, "model": model.name, "usage": usage}
    return JSONResponse(body, headers=ignored_header(ignored))


def encoded(vector_D: np.ndarray, fields: EmbeddingRequest) -> str | list[float]:
    """base64: of little-endian float32."""
    if fields.normalize:
        vector_D = vector_D / max(float(np.linalg.norm(vector_D)), np.finfo(np.float32).tiny)
    vector_D = vector_D.astype("<f4")
    return base64.b64encode(vector_D.tobytes()).decode() if fields.encoding_format == "base64" else vector_D.tolist()
