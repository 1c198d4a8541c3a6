"""CycloneDX 1.6 bill of materials (ECMA-424) of a corpus and its model, by the maintained library.

The library's classes have no model card and no data yet: both are added to its JSON, which its schema then checks."""

import json
from datetime import datetime
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from gristmill.foundation.errors import InputError
from gristmill.pipelines.provenance.summary.content import Content
from gristmill.pipelines.provenance.summary.facts import Fact

try:  # an optional extra
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator
    from packageurl import PackageURL
except ImportError as error:  # pragma: no cover
    raise InputError(f"gristmill summary needs the package {error.name}: pip install 'gristmill[papers]'") from None

CORPUS, MODEL = "corpus", "model"


def bill_of_materials(content: Content) -> bytes:
    """JSON of the bill."""
    bom = Bom(serial_number=uuid5(NAMESPACE_URL, f"gristmill:{content.fingerprint}"))
    bom.metadata.timestamp = datetime.fromisoformat(content.created)
    corpus = _corpus(content)
    sources = [_source(content, name) for name in content.sources]
    libraries = _libraries(content)
    bom.metadata.component = _model(content) if "train" in content.stages else corpus
    for component in (*([corpus] if "train" in content.stages else []), *sources, *libraries):
        bom.components.add(component)
    if "train" in content.stages:
        bom.register_dependency(bom.metadata.component, [corpus, *libraries])
    bom.register_dependency(corpus, sources)
    document = json.loads(JsonV1Dot6(bom).output_as_string())
    _add_data(document, content)
    if "train" in content.stages:
        document["metadata"]["component"]["modelCard"] = _model_card(content)
    return json.dumps(document, indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def check_bill(document: bytes) -> list[str]:
    """The errors of the strict JSON schema of CycloneDX 1.6."""
    errors = JsonStrictValidator(SchemaVersion.V1_6).validate_str(document.decode(), all_errors=True)
    return sorted(f"{error.data.json_path}: {error.data.message}"[:300] for error in errors or ())


def _properties(facts: list[Fact]) -> list[Property]:
    """The rows, query and digest of each fact."""
    return [
        Property(name=f"gristmill:{fact.name}:{name}", value=value)
        for fact in facts
        for name, value in (
            ("rows", json.dumps(fact.rows, sort_keys=True, ensure_ascii=False)),
            ("query", fact.query),
            ("digest", fact.digest),
        )
    ]


def _file(name: str, reference: str, sha256: str) -> Component:
    hashes = [HashType(alg=HashAlgorithm.SHA_256, content=sha256)]
    return Component(name=name, type=ComponentType.FILE, bom_ref=reference, hashes=hashes)


def _corpus(content: Content) -> Component:
    names = [name for name in ("documents", "outcomes", "reserved", "tokens") if name in content.facts]
    return Component(
        name=f"{content.recipe.name} corpus",
        type=ComponentType.DATA,
        bom_ref=CORPUS,
        version=content.stages["curate"].fingerprint,
        properties=_properties([content.facts[name] for name in names]),
        components=[
            _file(output.path, f"{CORPUS}/{output.path}", output.sha256)
            for output in content.stages["curate"].outputs
            if output.path.startswith("documents/")
        ],
    )


def _source(content: Content, name: str) -> Component:
    locked = next(source for source in content.stages["curate"].origin["lock"]["sources"] if source["name"] == name)
    return Component(
        name=name,
        type=ComponentType.DATA,
        bom_ref=f"source/{name}",
        version=content.stages["curate"].inputs.get(f"raw:{name}"),
        components=[
            _file(file["name"], f"source/{name}/{number}", file["sha256"])
            for number, file in enumerate(locked["files"])
        ],
    )


def _libraries(content: Content) -> list[Component]:
    versions = {
        (name, version)
        for manifest in content.stages.values()
        for name, version in manifest.libraries.items()
        if name != "python"
    }
    return [
        Component(
            name=name,
            type=ComponentType.LIBRARY,
            version=version,
            bom_ref=f"library/{name}/{version}",
            purl=PackageURL("pypi", name=name, version=version),
        )
        for name, version in sorted(versions)
    ]


def _model(content: Content) -> Component:
    train = content.stages["train"]
    return Component(
        name=content.answers.model_name or content.recipe.name,
        type=ComponentType.MACHINE_LEARNING_MODEL,
        bom_ref=MODEL,
        version=train.fingerprint,
        properties=_properties([content.facts[name] for name in ("model", "scores") if name in content.facts]),
        components=[_file(output.path, f"{MODEL}/{output.path}", output.sha256) for output in train.outputs],
    )


def _add_data(document: dict[str, Any], content: Content) -> None:
    """Adds what the library's classes lack to the components of type data."""
    for component in (document["metadata"]["component"], *document.get("components", ())):
        if component["type"] != "data":
            continue
        source = component["bom-ref"].removeprefix("source/")
        description = content.answers.source(source).description if source in content.sources else None
        entry = {"type": "dataset", "name": component["name"]}
        component["data"] = [entry | ({} if description is None else {"description": description})]


def _model_card(content: Content) -> dict[str, Any]:
    model = content.stages["train"].origin["recipe"].get("model") or {}
    considerations = {
        "useCases": [content.answers.intended_use] if content.answers.intended_use is not None else [],
        "technicalLimitations": [content.answers.limitations] if content.answers.limitations is not None else [],
    }
    metrics = [{"type": f"{row['task']} {row['metric']}", "value": str(row["score"])} for row in content.rows("scores")]
    return {
        "modelParameters": {
            "approach": {"type": "self-supervised"},
            "task": "text-generation",
            "architectureFamily": str(model.get("family", "transformer")),
            "datasets": [{"ref": CORPUS}],
            "inputs": [{"format": "text"}],
            "outputs": [{"format": "text"}],
        },
        **({"quantitativeAnalysis": {"performanceMetrics": metrics}} if metrics else {}),
        "considerations": {name: values for name, values in considerations.items() if values},
    }
