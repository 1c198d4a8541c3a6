"""The explorer's HTTP application: pages that a browser shows without running anything of a document."""

import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import parse_qs

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route

from gristmill.foundation.errors import InputError, RecipeError
from gristmill.foundation.progress import Reporter
from gristmill.foundation.runtime.listener import bound, is_loopback
from gristmill.pipelines.explorer import pages
from gristmill.pipelines.explorer.corpus import ExploredCorpus
from gristmill.pipelines.explorer.rows import Cursor, Filters

COOKIE = "gristmill_token"
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
MAX_BODY_BYTES = 1 << 20
MAX_PAGE = 10_000
EXACT_SECONDS = 2.0  # an answer without the exact counts comes so late
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; "
    "img-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
View = Callable[[ExploredCorpus, Request], str]


@dataclass(frozen=True)
class Address:
    """Where the server listens, and the token that requests must carry (None: no one needs one)."""

    host: str = "127.0.0.1"
    port: int = 8001
    token: str | None = None

    def check(self) -> None:
        """Raises RecipeError for a host that others reach without a token."""
        if not self.token and not is_loopback(self.host):
            raise RecipeError(
                f"--host {self.host} is reached by other machines; give --token-file, or listen on 127.0.0.1"
            )


def serve_pages(app: Starlette, address: Address, said: str, reporter: Reporter) -> None:
    """Serves until Ctrl-C. said: what is served. Raises InputError if the address cannot be listened on."""
    address.check()
    with bound(address.host, address.port) as listener:
        query = "?token=TOKEN" if address.token else ""
        reporter.info(f"{said} at http://{address.host}:{listener.getsockname()[1]}/{query}")
        settings = uvicorn.Config(app, log_level="warning", lifespan="off")
        uvicorn.Server(settings).run(sockets=[listener])


def make_app(corpus: ExploredCorpus, token: str | None = None) -> Starlette:
    """token: that requests carry as `Authorization: Bearer`, once as ?token=, or in the cookie set then."""

    views: dict[str, tuple[str, View]] = {
        "/": ("Corpus", overview),
        "/documents": ("Documents", documents),
        "/document/{doc_id}": ("Document", document),
        "/rules": ("Rules", lambda corpus, request: pages.rules(corpus.counts)),
        "/rule": ("Rule", rule),
        "/duplicates": ("Duplicates", clusters),
        "/duplicates/{doc_id}": ("Duplicates", cluster),
        "/contamination": ("Contamination", contamination),
        "/personal": ("Personal data", personal_data),
        "/sql": ("SQL", sql),
    }
    routes = [Route(path, endpoint(corpus, title, view)) for path, (title, view) in views.items()]
    routes += [
        Route("/document", lambda request: RedirectResponse(f"/document/{hex_id(request.query_params.get('id', ''))}")),
        Route("/rule/exact", lambda request: exact_counts(corpus, request)),
        Route("/similar", similar_page(corpus), methods=["GET", "POST"]),
        Route("/style.css", lambda request: Response(pages.CSS, media_type="text/css")),
        Route("/explore.js", lambda request: Response(pages.SCRIPT, media_type="text/javascript")),
    ]
    return guarded(routes, token)


def guarded(routes: list[Route], token: str | None) -> Starlette:
    """The application of these routes, of which every request is checked and every answer has HEADERS."""

    async def guard(request: Request, call_next: Callable) -> Response:
        response: Response = refused(request, token) or await call_next(request)
        response.headers.update(HEADERS)
        return response

    return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)])


def refused(request: Request, token: str | None) -> Response | None:
    """The answer to a request without the token, or of a page of another site (DNS rebinding); None if it may pass."""
    if token is None:
        host = re.sub(r":[0-9]*$", "", request.headers.get("host", ""))
        if host.lower() not in LOOPBACK_NAMES:
            return Response("the header Host names another machine; use localhost", 403)
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return Response("a page of another site sent this", 403)
        return None
    wanted = token.encode()
    if hmac.compare_digest(request.query_params.get("token", "").encode(), wanted):
        response = RedirectResponse("/")
        response.set_cookie(COOKIE, token, httponly=True, samesite="strict")
        return response
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    if any(hmac.compare_digest(sent.encode(), wanted) for sent in (bearer, request.cookies.get(COOKIE, ""))):
        return None
    return Response("the token is absent or wrong; open /?token=TOKEN", 401)


def endpoint(corpus: ExploredCorpus, title: str, view: View) -> Callable[[Request], Response]:
    """A page in a thread of its own; errors of the reader are pages too."""

    def answer(request: Request) -> Response:
        return rendered(title, lambda: view(corpus, request))

    return answer


def rendered(title: str, body: Callable[[], str], page: Callable[[str, str], str] = pages.page) -> Response:
    try:
        content, status = page(title, body()), 200
    except (InputError, RecipeError) as error:
        content, status = page(title, f"<p>{pages.html_text(error)}</p>"), 400
    return Response(content.encode("utf-8", "replace"), status, media_type="text/html; charset=utf-8")


def number(request: Request) -> int:
    """The page asked for, from 0. Raises InputError for no number."""
    asked = request.query_params.get("page", "0")
    if not (asked.isascii() and asked.isdigit() and int(asked[:9]) <= MAX_PAGE):
        raise InputError(f"page={asked[:20]}: give a number from 0 to {MAX_PAGE}")
    return int(asked)


def hex_id(text: str) -> str:
    """The id if it is one, else zeros, which no document has."""
    return text.strip() if re.fullmatch(r"[0-9a-f]{32}", text.strip()) else "0" * 32


def overview(corpus: ExploredCorpus, request: Request) -> str:
    sketches = corpus.sketches
    return pages.overview(corpus.counts, sketches.languages(), sketches.hosts(), sketches.num_hosts())


def documents(corpus: ExploredCorpus, request: Request) -> str:
    filters = Filters(**{name: request.query_params.get(name, "") for name in vars(Filters())})
    total, after = corpus.num_documents(filters), request.query_params.get("after", "")
    if not after and not filters.reads_text:
        return pages.documents(filters, total, corpus.sampled(filters), None)
    search = corpus.search(filters, Cursor.parse(after))
    return pages.documents(filters, total, search.rows, search)


def document(corpus: ExploredCorpus, request: Request) -> str:
    doc_id = request.path_params["doc_id"]
    start = request.query_params.get("start", "0")
    if not (start.isascii() and start.isdigit()):
        raise InputError(f"start={start[:20]}: give a number of characters")
    row, text = corpus.ledger_row(hex_id(doc_id)), corpus.texts([hex_id(doc_id)]).get(doc_id)
    events = corpus.history(hex_id(doc_id))
    return pages.document(row | {"doc_id": doc_id}, events, text, corpus.read_text(row["doc_id"]), int(start[:12]))


def rule(corpus: ExploredCorpus, request: Request) -> str:
    source, name, value = (request.query_params.get(key, "") for key in ("source", "rule", "value"))
    asked = corpus.threshold(source, name, value)
    return f"<p>{pages.html_text(name)}, source {pages.html_text(source)}</p>" + pages.rule(asked, corpus.sweep(asked))


def exact_counts(corpus: ExploredCorpus, request: Request) -> Response:
    """{"text": the exact counts}, with no text while they are counted."""
    try:
        asked = corpus.threshold(*(request.query_params.get(key, "") for key in ("source", "rule", "value")))
    except InputError as error:
        return JSONResponse({"text": str(error)}, 400)
    counts = corpus.thresholds.exact(asked, EXACT_SECONDS)
    return JSONResponse({"text": None if counts is None else pages.counted(counts, is_exact=True)})


def clusters(corpus: ExploredCorpus, request: Request) -> str:
    return pages.clusters(corpus.clusters(number(request)), number(request))


def contamination(corpus: ExploredCorpus, request: Request) -> str:
    page = number(request)
    return pages.contamination(corpus.contamination, corpus.contaminated(page), page)


def personal_data(corpus: ExploredCorpus, request: Request) -> str:
    return pages.personal_data(corpus.personal_data(number(request)))


def cluster(corpus: ExploredCorpus, request: Request) -> str:
    kept = hex_id(request.path_params["doc_id"])
    duplicates = corpus.duplicates(kept)
    if not duplicates:
        raise InputError(f"no document was removed as a duplicate of {kept}")
    other = hex_id(request.query_params.get("other", duplicates[0]["doc_id"]))
    return pages.cluster(kept, duplicates, other, corpus.texts([kept, other]))


def sql(corpus: ExploredCorpus, request: Request) -> str:
    query = request.query_params.get("q", "")
    return pages.sql(query, corpus.query(query) if query.strip() else None, corpus.schema)


def similar_page(corpus: ExploredCorpus) -> Callable:
    async def answer(request: Request) -> Response:
        body = b""
        async for part in request.stream():
            body += part
            if len(body) > MAX_BODY_BYTES:
                return Response(f"the text is larger than {MAX_BODY_BYTES} bytes; send less", 413)
        text = parse_qs(body.decode("utf-8", "replace")).get("text", [""])[0]
        return rendered("Similar documents", lambda: similar_body(corpus, request, text))

    return answer


def similar_body(corpus: ExploredCorpus, request: Request, text: str) -> str:
    doc_id, after = (request.query_params.get(name, "") for name in ("id", "after"))
    if after and not (after.isascii() and after.isdigit() and len(after) < 10):
        raise InputError(f"after={after[:20]}: is no place in the signatures; start again without it")
    text = text or (corpus.texts([hex_id(doc_id)]).get(doc_id, "") if doc_id else "")
    return pages.similar(text, corpus.signatures.nearest(text, int(after or 0)) if text else None)
