"""What tests have kubectl do most, without its process: that takes a fifth of a second of a core, and asks the API
server for all kinds that it serves.

The words, what is printed as JSON, warnings and refusals are kubectl's. What is about kubectl itself, or what only it
does (`apply` with its own memory, tables, exec, logs, wait), is its own: `Cluster.kubectl`.
"""

import argparse
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from subprocess import CompletedProcess
from typing import Final, NoReturn
from urllib.parse import urlencode

import yaml
from urllib3.exceptions import HTTPError

from cardwise.core.values.decoded import Json
from cardwise.kube.client import JSON_CONTENT_TYPE, PATCH_TYPES, KubeClient
from tests.cluster.applying import APPLY, MANAGER
from tests.cluster.processes import PATIENCE, wait_for

Words = argparse.Namespace

_WARNING = re.compile(r'299 \S+ "(.*)"')
_VALUES: Final = (
    "--as", "--as-group", "--cascade", "--dry-run", "--grace-period", "--raw", "--replicas", "--request-timeout",
    "--subresource", "--type", "--validate", "--wait",
)  # fmt: skip
_SWITCHES: Final = ("--all", "--force", "--force-conflicts", "--ignore-not-found", "--overwrite", "--server-side")


class Refused(Exception):
    """What the API server, or the way to it, says; `status` is 0 where there is no answer."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}: this is for Cluster.kubectl")


def _parser() -> _Parser:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("words", nargs="+")
    parser.add_argument("-n", "--namespace", default="default")
    parser.add_argument("-f", choices=["-"])
    parser.add_argument("-o", choices=["json"])
    parser.add_argument("-l", "--selector", default="")
    parser.add_argument("-p", "--patch", default="")
    for name in _VALUES:
        parser.add_argument(name, default="")
    for name in _SWITCHES:
        parser.add_argument(name, action="store_true")
    return parser


_PARSER = _parser()


class Verbs:
    """With the rights of `client`, or those of `--as`."""

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._versions: list[str] = []  # that the API server prefers, the core's first
        self._served: dict[str, list[Json]] = {}  # the kinds, by version

    def run(self, *args: str, stdin: object = None) -> CompletedProcess[str]:
        """`stdin`: a manifest, as text or as objects. Raises ValueError at words that are for kubectl."""
        words = _PARSER.parse_intermixed_args(args)
        verb, *words.words = words.words
        act = self._verbs().get(verb)
        if act is None:
            raise ValueError(f"{verb} is for Cluster.kubectl")
        call = _Call(self._client, words)
        try:
            done: object = act(call, _objects(stdin))
        except Refused as error:
            return CompletedProcess(args, 1, "", _lines([*call.warnings, f"Error from server {error}"]))
        return CompletedProcess(args, 0, json.dumps(done), _lines(call.warnings))

    def _verbs(self) -> Mapping[str, Callable[["_Call", list[Json]], object]]:
        return {
            "annotate": lambda call, _: self._mark(call, "annotations"),
            "apply": self._apply,
            "create": self._create,
            "delete": self._delete,
            "get": self._get,
            "label": lambda call, _: self._mark(call, "labels"),
            "patch": self._patch,
            "replace": self._replace,
            "scale": self._scale,
        }

    def _create(self, call: "_Call", objects: list[Json]) -> object:
        query = {"fieldValidation": call.words.validate.capitalize() or "Strict"}
        if call.words.raw:
            return [call.request("POST", call.words.raw, body=manifest) for manifest in objects][-1]
        return [
            call.request("POST", self._collection(call, manifest), body=_new(manifest), query=query)
            for manifest in objects
        ][-1]

    def _replace(self, call: "_Call", objects: list[Json]) -> object:
        if not call.words.raw:
            raise ValueError("replace without --raw is for Cluster.kubectl")
        (manifest,) = objects
        return call.request("PUT", call.words.raw, body=manifest)

    def _apply(self, call: "_Call", objects: list[Json]) -> object:
        if not call.words.server_side:
            raise ValueError("apply without --server-side is for Cluster.kubectl, which notes what it has applied")
        query = {
            "fieldManager": MANAGER,
            "fieldValidation": "Strict",
            "force": str(call.words.force_conflicts).lower(),
        }
        done = None
        for manifest in objects:
            path = f"{self._collection(call, manifest)}/{manifest['metadata']['name']}"
            done = call.request("PATCH", path, body=manifest, query=query, content_type=APPLY)
        return done

    def _get(self, call: "_Call", _: list[Json]) -> object:
        return call.request("GET", self._path(call), query={"labelSelector": call.words.selector})

    def _patch(self, call: "_Call", _: list[Json]) -> object:
        path = self._path(call) + (f"/{call.words.subresource}" if call.words.subresource else "")
        content_type = PATCH_TYPES[call.words.type or "strategic"]
        return call.request("PATCH", path, body=json.loads(call.words.patch), content_type=content_type)

    def _mark(self, call: "_Call", section: str) -> object:
        kind, name, *marks = call.words.words
        call.words.words = [kind, name]
        wanted: dict[str, str | None] = {}
        for mark in marks:
            key, separator, mark_text = mark.partition("=")
            if not separator and not key.endswith("-"):
                raise ValueError(f"{mark} is neither KEY=VALUE nor KEY-")
            wanted[key if separator else key[:-1]] = mark_text if separator else None
        return call.request(
            "PATCH", self._path(call), body={"metadata": {section: wanted}}, content_type=PATCH_TYPES["merge"]
        )

    def _scale(self, call: "_Call", _: list[Json]) -> object:
        change = {"spec": {"replicas": int(call.words.replicas)}}
        return call.request("PATCH", f"{self._path(call)}/scale", body=change, content_type=PATCH_TYPES["merge"])

    def _delete(self, call: "_Call", objects: list[Json]) -> object:
        """And, unless told otherwise, waits until they are gone."""
        options: Json = {"propagationPolicy": (call.words.cascade or "background").capitalize()}
        if call.words.grace_period:
            options["gracePeriodSeconds"] = int(call.words.grace_period)
        ending = []
        for path in self._named(call, objects):
            try:
                remaining = call.request("DELETE", path, body=options)
            except Refused as error:
                if error.status != 404 or not call.words.ignore_not_found:
                    raise
                continue
            ending.append((path, remaining.get("metadata", {}).get("uid")))
        if call.words.wait != "false" and not call.words.dry_run:
            for path, uid in ending:
                if uid and not wait_for(lambda path=path, uid=uid: _uid(call, path) != uid):
                    raise Refused(f"{path} is there after {PATIENCE:.0f} s")
        return [path for path, _ in ending]

    def _named(self, call: "_Call", objects: list[Json]) -> Iterator[str]:
        """Paths of the objects that the words name."""
        for manifest in objects:
            yield f"{self._collection(call, manifest)}/{manifest['metadata']['name']}"
        words = list(call.words.words)
        if call.words.all or call.words.selector:
            path = self._path(call)
            for manifest in call.request("GET", path, query={"labelSelector": call.words.selector})["items"]:
                yield f"{path}/{manifest['metadata']['name']}"
            return
        kind = words.pop(0) if words and "/" not in words[0] else ""
        for word in words:
            of, _, name = word.rpartition("/")
            yield self._path(call, of or kind, name)

    # Where things are.

    def _path(self, call: "_Call", kind: str = "", name: str = "") -> str:
        """Of the collection, or the object, that the words name."""
        if not kind:
            kind, name, *others = [*call.words.words, ""]
            if any(others) or "/" in kind or "," in kind:
                raise ValueError(f"{' '.join(call.words.words)}: several at once are for Cluster.kubectl")
        for _ in range(2):
            for version in self._preferred(call):
                for resource in self._kinds(call, version):
                    if kind.lower() in _names(resource):
                        return _place(version, resource, call.words.namespace, name)
            self._forget()
        raise Refused(f"the server doesn't have a resource type {kind!r}")

    def _collection(self, call: "_Call", manifest: Json) -> str:
        for _ in range(2):
            for resource in self._kinds(call, manifest["apiVersion"]):
                if resource["kind"] == manifest["kind"]:
                    return _place(
                        manifest["apiVersion"], resource, manifest["metadata"].get("namespace") or call.words.namespace
                    )
            self._forget()
        raise Refused(f"no matches for kind {manifest['kind']}")

    def _forget(self) -> None:
        """A CRD may have come since."""
        self._versions = []
        self._served.clear()

    def _preferred(self, call: "_Call") -> list[str]:
        if not self._versions:
            groups = call.request("GET", "/apis")["groups"]
            self._versions = ["v1", *(resource["preferredVersion"]["groupVersion"] for resource in groups)]
        return self._versions

    def _kinds(self, call: "_Call", version: str) -> list[Json]:
        if version not in self._served:
            listed = call.request("GET", _base(version))["resources"]
            self._served[version] = [resource for resource in listed if "/" not in resource["name"]]
        return self._served[version]


class _Call:
    """One command: its words, and the warnings that came with the answers."""

    def __init__(self, client: KubeClient, words: Words) -> None:
        self._client = client
        self.words = words
        self.warnings: list[str] = []

    def request(
        self,
        method: str,
        path: str,
        *,
        body: object = None,
        query: Mapping[str, str] | None = None,
        content_type: str = JSON_CONTENT_TYPE,
    ) -> Json:
        """Raises Refused."""
        parameters = {key: part for key, part in (query or {}).items() if part}
        headers = dict(self._client._request_headers(content_type))
        user = getattr(self.words, "as")
        if method != "GET":
            parameters |= {"dryRun": "All"} if self.words.dry_run else {}
            headers |= {"Impersonate-User": user} if user else {}
            headers |= {"Impersonate-Group": self.words.as_group} if self.words.as_group else {}
        seconds = self.words.request_timeout.removesuffix("s")
        try:
            answer = self._client._connection_pool().urlopen(
                method,
                f"{path}?{urlencode(parameters)}" if parameters else path,
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                retries=False,
                timeout=self._client._timeout(float(seconds) if seconds else PATIENCE),
            )
        except HTTPError as error:
            raise Refused(f"{method} {path}: {error}") from error
        self.warnings += [f"Warning: {text}" for text in _warnings(answer.headers.getlist("Warning"))]
        if answer.status >= 400:
            raise Refused(_error_text(answer.data), answer.status)
        document: Json = json.loads(answer.data)
        return document


def _new(manifest: Json) -> Json:
    """Of what was read somewhere."""
    return manifest | {
        "metadata": {key: part for key, part in manifest["metadata"].items() if key != "resourceVersion"}
    }


def _error_text(body: bytes) -> str:
    """By an object, or, of a group that nobody serves, in plain text."""
    try:
        document = json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
    return f"({document.get('reason', '')}): {document.get('message', '')}"


def _uid(call: _Call, path: str) -> str | None:
    try:
        uid: str = call.request("GET", path)["metadata"]["uid"]
    except Refused as error:
        if error.status == 404:
            return None
        raise
    return uid


def _base(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _names(kind: Json) -> set[str]:
    return {kind["name"], kind["singularName"], kind["kind"].lower(), *kind.get("shortNames", ())}


def _place(version: str, kind: Json, namespace: str, name: str = "") -> str:
    parts = [_base(version), *(["namespaces", namespace] if kind["namespaced"] else []), kind["name"], name]
    return "/".join(part for part in parts if part)


def _objects(stdin: object) -> list[Json]:
    if isinstance(stdin, str):
        return [manifest for manifest in yaml.load_all(stdin, yaml.CSafeLoader) if manifest]
    return list(stdin) if isinstance(stdin, list | tuple) else [dict(stdin)] if isinstance(stdin, Mapping) else []


def _warnings(headers: Sequence[str]) -> Iterator[str]:
    for header in headers:
        if warning := _WARNING.fullmatch(header):
            yield re.sub(r"\\(.)", r"\1", warning[1])


def _lines(texts: Sequence[str]) -> str:
    return "".join(f"{text}\n" for text in texts)
