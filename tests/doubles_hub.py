"""A stand-in for the model hub: a few repositories over HTTP, as huggingface_hub asks for them."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import unquote, urlsplit

Revisions = Mapping[str, Mapping[str, bytes]]  # branch or tag -> file name -> content


class HubStandIn:
    """Serves ``repos`` by "org/name"; the commit of a revision is the hash of its name.

    With ``token`` set, requests without it are answered as the hub answers for a private repository, or a
    gated one. ``requests`` lists (method, path, Authorization header).
    """

    def __init__(self, repos: Mapping[str, Revisions], token: str | None = None) -> None:
        self.repos = repos
        self.token = token
        self.is_gated = False
        self.requests: list[tuple[str, str, str | None]] = []
        self.url = ""

    @staticmethod
    def commit_of(revision: str) -> str:
        return hashlib.sha1(revision.encode()).hexdigest()

    def files_at(self, repo: str, revision: str) -> tuple[str, Mapping[str, bytes]] | None:
        """Return (commit, files) of a branch, tag or commit."""
        for name, files in self.repos[repo].items():
            if revision in (name, self.commit_of(name)):
                return self.commit_of(name), files
        return None

    @property
    def downloaded(self) -> set[str]:
        """Names of the files that were fetched whole."""
        return {path.rsplit("/", 1)[1] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path}

    @contextmanager
    def serve(self) -> Iterator["HubStandIn"]:
        """Answer on a free local port, given by ``url``."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler_for(self))
        self.url = f"http://127.0.0.1:{server.server_port}"
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            thread.join()
            server.server_close()


def _handler_for(hub: HubStandIn) -> type[BaseHTTPRequestHandler]:
    class Responder(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self._route()

        def do_GET(self) -> None:
            self._route()

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _route(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.requests.append((self.command, path, self.headers.get("Authorization")))
            if hub.token and self.headers.get("Authorization") != f"Bearer {hub.token}":
                self._refuse(403 if hub.is_gated else 401, "GatedRepo" if hub.is_gated else "RepoNotFound")
            elif api := re.fullmatch(r"/api/models/([^/]+/[^/]+)/?(.*)", path):
                self._answer_api(*api.groups())
            elif file := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
                self._answer_file(*file.groups())
            else:
                self._refuse(404, "RepoNotFound")

        def _answer_api(self, repo: str, rest: str) -> None:
            if repo not in hub.repos:
                self._refuse(404, "RepoNotFound")
                return
            kind, _, revision = rest.partition("/")
            found = hub.files_at(repo, revision or "main")
            if found is None:
                self._refuse(404, "RevisionNotFound")
                return
            commit, files = found
            if kind == "tree":
                entries = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for name, data in files.items()
                ]
                self._send(json.dumps(entries).encode(), {"Content-Type": "application/json"})
            else:
                info = {"id": repo, "sha": commit, "siblings": [{"rfilename": name} for name in files]}
                self._send(json.dumps(info).encode(), {"Content-Type": "application/json"})

        def _answer_file(self, repo: str, revision: str, name: str) -> None:
            found = hub.files_at(repo, revision)
            if found is None or name not in found[1]:
                self._refuse(404, "EntryNotFound" if found else "RevisionNotFound")
                return
            commit, files = found
            etag = hashlib.sha1(files[name]).hexdigest()
            self._send(files[name], {"X-Repo-Commit": commit, "ETag": f'"{etag}"'})

        def _refuse(self, status: int, code: str) -> None:
            self._send(b"{}", {"X-Error-Code": code, "X-Error-Message": code}, status)

        def _send(self, body: bytes, headers: Mapping[str, str], status: int = 200) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body)

    return Responder
