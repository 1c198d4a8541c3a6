"""SPDX 3.0.1 document of a corpus and its model with the profiles Core, Software, Dataset and AI, by SPDX's library.

The library's classes are generated from SPDX's SHACL model: types are checked as values are set, required properties as
the document is written and read."""

import json
from datetime import datetime
from typing import Any

from gristmill.foundation.errors import InputError
from gristmill.pipelines.provenance.summary.content import Content

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
