"""From a record's named fields to a document: which field holds the text is the recipe's to say."""

from typing import Any

import orjson

from gristmill.data_pipeline.document import Record, Unreadable, excerpt
from gristmill.data_pipeline.readers.source import SourceConfig


def record_from_fields(fields: dict[str, Any], number: int, offset: int, source: SourceConfig) -> Record | Unreadable:
    """The record, or why it is none: no text field (its fields are named, with the mend), or one that is no string."""
    wanted = source.html_field or source.text_field
    setting = "html_field" if source.html_field else "text_field"
    if wanted not in fields:
        known = ", ".join(sorted(fields)) or "none"
        reason = f"no field {wanted!r}; fields are {known[:200]}; set {setting} of source {source.name}"
        return Unreadable(number, "no_text_field", reason, offset, excerpt(orjson.dumps(fields, default=str)))
    text = fields[wanted]
    if not isinstance(text, str):
        return Unreadable(
            number, "text_no_string", f"field {wanted!r} is {_kind(text)}, no string", offset, excerpt(str(text))
        )
    return Record(
        number,
        "" if source.html_field else text,
        url=_string(fields, source.url_field),
        language=_string(fields, source.language_field) or source.language or "",
        metadata=_metadata(fields, wanted, source),
        html=text.encode("utf-8", "surrogatepass") if source.html_field else None,
        charset="utf-8" if source.html_field else None,
    )


def metadata_json(metadata: dict[str, Any]) -> str:
    """One form for equal metadata: sorted keys, no spaces. What JSON has no form for is written as a string."""
    return orjson.dumps(metadata, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS, default=str).decode()


def _metadata(fields: dict[str, Any], text_field: str, source: SourceConfig) -> dict[str, Any]:
    if source.metadata_fields == "none":
        return {}
    used = {text_field, source.url_field, source.language_field}
    chosen = fields.keys() if source.metadata_fields == "all" else source.metadata_fields
    return {key: fields[key] for key in chosen if key in fields and key not in used and fields[key] is not None}


def _string(fields: dict[str, Any], name: str | None) -> str:
    value = fields.get(name) if name else None
    return value if isinstance(value, str) else ""


def _kind(value: Any) -> str:
    return "null" if value is None else type(value).__name__
