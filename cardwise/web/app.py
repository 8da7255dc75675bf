"""The routes of the page, its response headers, and the stream of updates."""

import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, partial
from http import HTTPStatus
from itertools import chain
from typing import Any, Final

from flask import Flask, Response, render_template, request
from markupsafe import Markup
from werkzeug.exceptions import HTTPException, NotFound, ServiceUnavailable

from cardwise.cli import console, rights
from cardwise.cli.cluster import podevents
from cardwise.cli.commands import explain, nodes
from cardwise.cli.explanation import missingpods
from cardwise.core.api import quotas
from cardwise.core.values.decoded import Json
from cardwise.core.values.invalid import InvalidRequest
from cardwise.kube import clusterstate, errors, paths
from cardwise.web import pages
from cardwise.web.pages import Filters
from cardwise.web.snapshot import ClusterReader, Snapshot

Arguments = Mapping[str, str]  # of the address
Parts = Iterable[tuple[str, str]]  # the elements of a page that are updated: id and HTML, from top to bottom
Page = Callable[[Arguments], Parts]

MAX_STREAMS: Final = 12  # open pages; each takes a connection and a thread
_KEEP_ALIVE_SECONDS: Final = 15.0  # a stream without news sends a comment, so that a closed page is noticed
_MAX_DETAILED_GPUS: Final = 128  # with more GPUs, only the bars of the shares are shown, without their names
_AMOUNTS: Final = ("gpu-mem", "gpu-count", "gpu", "core", "class")  # keys of `cardwise simulate --pod`
_CHUNK_PARTS: Final = 40  # pieces of a template that are sent together
_HEADERS: Final = {
    # Only files of this server: no script, style, frame or address of anybody else, nothing inline.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",  # the address contains the token
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class _PageApp(Flask):
    # Control characters and those that turn the direction of text become visible, as on the terminal.
    jinja_options = {  # noqa: RUF012 - as in Flask
        "trim_blocks": True,
        "lstrip_blocks": True,
        "finalize": lambda shown: console.clean_line(shown) if type(shown) is str else shown,
    }


def create_app(reader: ClusterReader) -> Flask:
    """The application that shows what `reader` reads."""
    app = _PageApp(__name__)
    app.config["SEND_FILE_MAX_AGE_DEFAULT"] = 3600
    app.jinja_env.globals |= {"width": pages.BAR_WIDTH}
    app.jinja_env.filters["mib"] = _format_mib
    app.jinja_env.filters["entry_title"] = quotas.entry_title
    views = _Views(app, reader)
    live: Mapping[str, tuple[str, Page]] = {
        "gpus": ("GPUs", views.gpus),
        "node": ("Node", views.node),
        "nodes": ("Nodes", views.nodes),
        "waiting": ("Waiting pods", views.waiting),
        "pod": ("Pod", views.pod),
        "gangs": ("Gangs", views.gangs),
        "quotas": ("Quotas", views.quotas),
    }
    streams = threading.BoundedSemaphore(MAX_STREAMS)

    def show(name: str) -> Response:
        title, page = live[name]
        snapshot, filters = reader.latest(), _filters(request.args)
        parts = iter(page(request.args))
        first = next(parts)  # an error gets a page of its own, so it must come before the first byte
        html = (Markup(part) for _, part in chain([first], parts))  # noqa: S704 - Jinja has rendered and escaped it
        text = app.jinja_env.get_template("page.html").stream(
            title=title, page=name, parts=html, snapshot=snapshot, filters=filters
        )
        # The browser paints the first nodes while the others are rendered.
        text.enable_buffering(_CHUNK_PARTS)
        return Response(text, mimetype="text/html")

    for name in live:
        app.add_url_rule("/" if name == "gpus" else f"/{name}", name, partial(show, name))

    @app.get("/try", endpoint="try")
    def try_amount() -> str:
        return render_template(
            "try.html", title="Try", page="try", snapshot=reader.latest(), **views.trial(request.args)
        )

    @app.get("/explanation")
    def explanation() -> str:
        return render_template("explanation.html", **views.explanation(request.args))

    @app.get("/events")
    def events() -> Response:
        if request.args.get("page") not in live:
            raise NotFound("There is no such page.")
        _, page = live[request.args["page"]]
        if not streams.acquire(blocking=False):
            raise ServiceUnavailable("Too many pages are open: close some of them.")
        response = Response(_updates(reader, page, request.args), mimetype="text/event-stream")
        response.call_on_close(streams.release)
        return response

    @app.after_request
    def add_headers(response: Response) -> Response:
        response.headers.update(_HEADERS)
        if request.endpoint != "static":
            response.headers["Cache-Control"] = "no-store"
        return response

    @app.errorhandler(errors.KubeError)
    def show_kube_error(error: errors.KubeError) -> tuple[str, int]:
        if isinstance(error, errors.Forbidden):
            return _show_error("Not permitted", rights.describe_refusal(error)), HTTPStatus.FORBIDDEN
        return _show_error("The API server does not answer", str(error)), HTTPStatus.BAD_GATEWAY

    @app.errorhandler(HTTPException)
    def show_http_error(error: HTTPException) -> tuple[str, int]:
        return _show_error(error.name, error.description or ""), error.code or HTTPStatus.INTERNAL_SERVER_ERROR

    return app


def _format_mib(mib: int) -> Markup:
    """A number with narrow spaces between its thousands, which break no line."""
    return Markup(f"{int(mib):,}".replace(",", "\N{NARROW NO-BREAK SPACE}"))  # noqa: S704 - digits


def _show_error(title: str, text: str) -> str:
    return render_template("error.html", title=title, page="", text=text)


def _updates(reader: ClusterReader, page: Page, arguments: Arguments) -> Iterator[str]:
    """The messages of a stream: changed parts, or `reload` if parts were added or removed; until the browser leaves.

    A page that shows an older snapshot than the stream begins with is fetched again.
    """
    shown: dict[str, str] = {}
    generation = int(arguments.get("generation", "")) if arguments.get("generation", "").isdecimal() else 0
    yield "retry: 3000\n\n"
    last_message = reader.clock.now()
    problem = ""
    while True:
        try:
            newest = reader.latest(reader.pause).generation
            parts = dict(page(arguments)) if newest != generation or not shown else shown
            message: dict[str, Any] = {}
            # Of a page that shows another snapshot than the first here, it is unknown which parts are outdated.
            if parts.keys() != shown.keys() if shown else newest != generation:
                message = {"reload": True}
            else:
                message = {"parts": {key: html for key, html in parts.items() if shown.get(key, html) != html}}
            if problem:
                message["problem"] = problem = ""
            shown, generation = parts, newest
        except errors.KubeError as error:
            problem, message = str(error), {"problem": console.clean_line(f"Outdated: {error}")}
        if message.get("reload") or message.get("parts") or "problem" in message:
            yield f"data: {json.dumps(message)}\n\n"
            last_message = reader.clock.now()
        elif reader.clock.now() - last_message > _KEEP_ALIVE_SECONDS:
            yield ": no news\n\n"
            last_message = reader.clock.now()
        reader.clock.sleep(reader.pause)


def _filters(arguments: Arguments) -> Filters:
    return Filters(
        arguments.get("name", "").strip(),
        arguments.get("class", "").strip(),
        arguments.get("namespace", "").strip(),
        arguments.get("label", "").strip(),
    )


class _Views:
    """The parts of each page, for the arguments of an address."""

    def __init__(self, app: Flask, reader: ClusterReader) -> None:
        self._reader = reader
        self._templates = app.jinja_env
        # Most nodes are as they were two seconds ago, and all open pages show the same snapshot.
        self._render_node = lru_cache(maxsize=4096)(
            lambda node, detailed: self._render("parts/node.html", node=node, detailed=detailed)
        )
        self._render_gpus = lru_cache(maxsize=4)(self._render_overview)

    def _render(self, template: str, **context: Any) -> str:
        return self._templates.get_template(template).render(context)

    def gpus(self, arguments: Arguments) -> Parts:
        """A summary, and one part for each node."""
        return self._render_gpus(self._reader.latest(), _filters(arguments))

    def _render_overview(self, snapshot: Snapshot, filters: Filters) -> Parts:
        all_nodes = pages.list_nodes(snapshot, filters)
        summary, legend = pages.summarize(all_nodes), pages.list_namespaces(all_nodes)
        top = self._render("parts/summary.html", summary=summary, legend=legend, snapshot=snapshot, filters=filters)
        detailed = summary.gpus <= _MAX_DETAILED_GPUS
        nodes = ((f"node-{node.name}", self._render_node(node, detailed)) for node in all_nodes)
        return [("summary", top), *nodes]

    def node(self, arguments: Arguments) -> Parts:
        """One node in full."""
        name = arguments.get("node", "")
        matching = [node for node in pages.list_nodes(self._reader.latest(), Filters(node=name)) if node.name == name]
        if not matching:
            raise NotFound("There is no node of this name with a GPU that Cardwise shares, or you may not read GPUs.")
        return [("view", self._render("parts/nodepage.html", node=matching[0]))]

    def nodes(self, _: Arguments) -> Parts:
        """The table of `cardwise nodes`."""
        snapshot, client = self._reader.latest(), self._reader.client
        summary = None
        if snapshot.cluster is not None:
            # Of its own: the summary marks the cards of nodes that take no pods.
            cluster = clusterstate.read_cluster_state(client, addresses=False, own_namespace=client.namespace)
            summary = nodes.summarize_cluster(client, cluster, self._reader.cardwise_namespace)
        return [("view", self._render("parts/nodes.html", summary=summary, snapshot=snapshot))]

    def waiting(self, arguments: Arguments) -> Parts:
        """The pods without a node."""
        snapshot = self._reader.latest()
        waiting = pages.list_waiting(snapshot, _filters(arguments))
        return [("view", self._render("parts/waiting.html", pods=waiting, snapshot=snapshot))]

    def explanation(self, arguments: Arguments) -> dict[str, Any]:
        """What `cardwise explain` says about a pod: its manifest, None if it is gone; lines; notes."""
        namespace, name = arguments.get("namespace", ""), arguments.get("name", "")
        client = self._reader.client
        if not namespace or not name:
            raise NotFound("The address names no pod.")
        try:
            pod: Json | None = client.get(paths.pods(namespace, name))
        except errors.NotFound:
            pod = None
        events = podevents.events_of_pod(client, namespace, name)
        notes: list[str] = []
        if pod is None:
            lines = missingpods.explain_gone_pod(namespace, name, events)
            if not lines:
                raise NotFound(f"There is no pod {name!r} in namespace {namespace!r}.")
        else:
            text, _ = explain.explain_pod(client, pod, namespace, self._reader.cardwise_namespace, notes.append)
            lines = text.splitlines()
        return {"namespace": namespace, "name": name, "pod": pod, "events": events, "lines": lines, "notes": notes}

    def pod(self, arguments: Arguments) -> Parts:
        """A pod: why it waits or where it is, its shares, its life."""
        explained = self.explanation(arguments)
        snapshot = self._reader.latest()
        gpus = [
            (node, gpu, share)
            for node in pages.list_nodes(snapshot, Filters())
            for gpu in node.gpus
            for share in gpu.shares
            if (share.namespace, share.pod) == (explained["namespace"], explained["name"])
        ]
        moments = pages.list_moments(explained["pod"], explained["events"])
        return [("view", self._render("parts/pod.html", **explained, gpus=gpus, moments=moments))]

    def gangs(self, _: Arguments) -> Parts:
        """The gangs with their members."""
        snapshot = self._reader.latest()
        gangs = [
            (gang, pages.list_members(gang), pages.format_age(gang.created, snapshot.read_at))
            for gang in snapshot.gangs
        ]
        return [("view", self._render("parts/gangs.html", gangs=gangs))]

    def quotas(self, _: Arguments) -> Parts:
        """The quotas with their use."""
        snapshot = self._reader.latest()
        entries = [(view, pages.list_limits(view)) for view in snapshot.quotas]
        return [("view", self._render("parts/quotas.html", entries=entries, native=snapshot.native_quotas))]

    def trial(self, arguments: Arguments) -> dict[str, Any]:
        """Where a pod with the typed amounts would go."""
        from cardwise.web import whereto  # noqa: PLC0415 - loads numpy

        cluster = self._reader.latest().cluster
        amounts = {key: text.strip() for key in _AMOUNTS if (text := arguments.get(key, "")).strip()}
        shown: dict[str, Any] = {"amounts": amounts, "trial": None, "problem": ""}
        if cluster is None or not amounts:
            return shown
        try:
            pod = whereto.parse_amounts(amounts, cluster)
            shown["trial"] = whereto.try_pod(self._reader.latest(), cluster, pod)
        except InvalidRequest as error:
            shown["problem"] = str(error)
        return shown
