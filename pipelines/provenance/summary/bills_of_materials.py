"""Bills of materials of a corpus and its model, in SPDX and CycloneDX.

SPDX 3.0.1 document of a corpus and its model with the profiles Core, Software, Dataset and AI, by SPDX's library.

The library's classes are generated from SPDX's SHACL model: types are checked as values are set, required properties as
the document is written and read."""

import json
from datetime import datetime
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from gristmill.foundation.errors import InputError
from gristmill.pipelines.provenance.summary.summary_content import Content, Fact

try:  # an optional extra
    from spdx_python_model import v3_0_1 as spdx
except ImportError as error:  # pragma: no cover
    raise InputError(f"gristmill summary needs the package {error.name}: pip install 'gristmill[papers]'") from None


class DocumentBuilder:
    """Elements of one SPDX document, whose ids are the papers' fingerprint and a name."""

    def __init__(self, content: Content):
        self.content = content
        self.namespace = f"urn:gristmill:{content.fingerprint}"
        self.elements: list[Any] = []
        self.creation = spdx.CreationInfo()
        self.creation.specVersion = "3.0.1"
        self.creation.created = datetime.fromisoformat(content.created)
        provider = self.add(spdx.Organization(), "provider")
        provider.name = content.answers.provider or "provider not named: an open question"
        self.creation.createdBy.append(provider)
        tool = self.add(spdx.Tool(), "gristmill")
        tool.name = "gristmill"
        self.creation.createdUsing.append(tool)

    def add(self, element: Any, name: str) -> Any:
        element.set_id(f"{self.namespace}#{name}")
        element.creationInfo = self.creation
        self.elements.append(element)
        return element

    def relate(self, source: Any, kind: str, targets: list[Any]) -> None:
        relation = self.add(spdx.Relationship(), f"relation-{len(self.elements)}")
        relation.from_ = source
        relation.relationshipType = getattr(spdx.RelationshipType, kind)
        relation.to.extend(targets)

    def file(self, name: str, path: str, sha256: str) -> Any:
        element = self.add(spdx.software_File(), name)
        element.name = path
        digest = spdx.Hash()
        digest.algorithm, digest.hashValue = spdx.HashAlgorithm.sha256, sha256
        element.verifiedUsing.append(digest)
        return element

    def license(self, element: Any, name: str, expression: str | None) -> None:
        """Declares the licence that a person named; none is written where the question is open."""
        if expression is not None:
            declared = self.add(spdx.simplelicensing_LicenseExpression(), f"license-{name}")
            declared.simplelicensing_licenseExpression = expression
            self.relate(element, "hasDeclaredLicense", [declared])


def spdx_document(content: Content) -> bytes:
    """JSON-LD of the document."""
    builder = DocumentBuilder(content)
    corpus = _corpus(builder)
    sources = [_source(builder, name) for name in content.sources]
    builder.relate(corpus, "dependsOn", sources)
    root = corpus
    if "train" in content.stages:
        root = _model(builder)
        builder.relate(root, "trainedOn", [corpus])
    document = builder.add(spdx.SpdxDocument(), "document")
    document.name = content.recipe.name
    profiles = spdx.ProfileIdentifierType
    document.profileConformance.extend(
        [profiles.core, profiles.software, profiles.dataset, profiles.ai, profiles.simpleLicensing]
    )
    document.rootElement.append(root)
    document.element.extend(element for element in builder.elements if element is not document)
    written = spdx.JSONLDSerializer().serialize_data(spdx.SHACLObjectSet(builder.elements), force_at_graph=True)
    return json.dumps(_in_order(written), indent=1, sort_keys=True, ensure_ascii=False).encode() + b"\n"


def check_spdx(document: bytes) -> list[str]:
    """The errors of SPDX's classes when they read the document and write it again."""
    objects = spdx.SHACLObjectSet()
    try:
        content = json.loads(document)
        spdx.JSONLDDeserializer().deserialize_data(content, objects)
        missing = objects.link()
        spdx.JSONLDSerializer().serialize_data(objects, force_at_graph=True)
    except (ValueError, TypeError, KeyError) as error:
        return [str(error)]
    return [f"no element {name}" for name in sorted(missing or ())]


def _in_order(document: dict[str, Any]) -> dict[str, Any]:
    """The document with its elements sorted by id: the library writes a set."""
    graph = sorted(document["@graph"], key=lambda element: json.dumps(element, sort_keys=True))
    return document | {"@graph": graph}


def _numbers(content: Content, names: tuple[str, ...]) -> str:
    """Facts as text with their digests, for elements that have no property for them."""
    facts = [content.facts[name] for name in names if name in content.facts]
    rows = [json.dumps(fact.rows, sort_keys=True, ensure_ascii=False) for fact in facts]
    return "\n".join(
        f"{fact.name} {fact.digest}: {text} = {fact.query}" for fact, text in zip(facts, rows, strict=True)
    )


def _corpus(builder: DocumentBuilder) -> Any:
    content = builder.content
    curate = content.stages["curate"]
    corpus = builder.add(spdx.dataset_DatasetPackage(), "corpus")
    corpus.name = f"{content.recipe.name} corpus"
    corpus.software_packageVersion = curate.fingerprint
    corpus.software_primaryPurpose = spdx.software_SoftwarePurpose.data
    corpus.builtTime = datetime.fromisoformat(content.created)
    corpus.dataset_datasetType.append(spdx.dataset_DatasetType.text)
    corpus.dataset_datasetSize = content.total("documents", "bytes")
    corpus.dataset_dataPreprocessing.append(_numbers(content, ("outcomes", "reserved")))
    corpus.comment = _numbers(content, ("documents", "languages", "licenses", "crawl_dates"))
    if content.answers.intended_use is not None:
        corpus.dataset_intendedUse = content.answers.intended_use
    if content.answers.limitations is not None:
        corpus.dataset_knownBias.append(content.answers.limitations)
    files = [
        builder.file(f"corpus/{output.path}", f"curate/{output.path}", output.sha256)
        for output in curate.outputs
        if output.path.startswith("documents/")
    ]
    builder.relate(corpus, "contains", files)
    builder.license(corpus, "corpus", content.answers.corpus_license)
    return corpus


def _source(builder: DocumentBuilder, name: str) -> Any:
    content = builder.content
    given = content.answers.source(name)
    curate = content.stages["curate"]
    locked = next(source for source in curate.origin["lock"]["sources"] if source["name"] == name)
    element = builder.add(spdx.dataset_DatasetPackage(), f"source/{name}")
    element.name = given.title or name
    element.software_packageVersion = curate.inputs[f"raw:{name}"]
    element.dataset_datasetType.append(spdx.dataset_DatasetType.text)
    element.software_primaryPurpose = spdx.software_SoftwarePurpose.data
    element.dataset_datasetSize = sum(file["bytes"] for file in locked["files"])
    if given.link is not None:
        element.software_downloadLocation = given.link
    if given.description is not None:
        element.dataset_dataCollectionProcess = given.description
    files = [
        builder.file(f"source/{name}/{number}", file["name"], file["sha256"])
        for number, file in enumerate(locked["files"])
    ]
    if files:
        builder.relate(element, "contains", files)
    builder.license(element, f"source/{name}", given.license)
    return element


def _model(builder: DocumentBuilder) -> Any:
    content = builder.content
    train = content.stages["train"]
    model = builder.add(spdx.ai_AIPackage(), "model")
    model.name = content.answers.model_name or content.recipe.name
    model.software_packageVersion = train.fingerprint
    model.software_primaryPurpose = spdx.software_SoftwarePurpose.model
    model.ai_informationAboutTraining = _numbers(content, ("model", "tokens"))
    if content.answers.limitations is not None:
        model.ai_limitation = content.answers.limitations
    if content.answers.intended_use is not None:
        model.ai_informationAboutApplication = content.answers.intended_use
    for row in content.rows("scores"):
        metric = spdx.DictionaryEntry()
        metric.key, metric.value = f"{row['task']} {row['metric']}", str(row["score"])
        model.ai_metric.append(metric)
    files = [builder.file(f"model/{output.path}", f"train/{output.path}", output.sha256) for output in train.outputs]
    builder.relate(model, "contains", files)
    builder.license(model, "model", content.answers.model_license)
    return model


# CycloneDX 1.6 bill of materials (ECMA-424) of a corpus and its model, by the maintained library.
#
# The library's classes have no model card and no data yet: both are added to its JSON, which its schema then checks.

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
    corpus = _corpus_component(content)
    sources = [_source_component(content, name) for name in content.sources]
    libraries = _libraries(content)
    bom.metadata.component = _model_component(content) if "train" in content.stages else corpus
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


def _corpus_component(content: Content) -> Component:
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


def _source_component(content: Content, name: str) -> Component:
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


def _model_component(content: Content) -> Component:
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
