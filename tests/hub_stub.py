"""A hub on this machine: those of its endpoints that huggingface_hub uses to send files, over HTTP.

Written from the requests that the client makes; it stores files in memory and answers for three tokens.
"""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import sha1, sha256
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

WRITER, READER = "hf_writer", "hf_reader"  # any other token is unknown
LFS_SUFFIXES = (".safetensors", ".gguf")


class Refusal(Exception):  # noqa: N818
    """An answer that ends a request."""

    def __init__(self, status: int, message: str, **besides: str) -> None:
        super().__init__(message)
        self.status = status
        self.answer = {"error": message, **besides}


@dataclass
class Repo:
    """A repository: each branch's files and head."""

    private: bool
    branches: dict[str, dict[str, bytes]] = field(default_factory=lambda: {"main": {".gitattributes": b""}})
    heads: dict[str, str] = field(default_factory=lambda: {"main": "0" * 40})


@dataclass
class Hub:
    """What the stub holds.

    Attributes:
        url: where it listens.
        requests: method and path of each request, in order.
        stored: bodies of large files by SHA-256.
        refuse_lfs: SHA-256 of files whose upload is refused.
        commits: messages, in order.
    """

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    stored: dict[str, bytes] = field(default_factory=dict)
    refuse_lfs: set[str] = field(default_factory=set)
    commits: list[str] = field(default_factory=list)

    def uploads(self) -> int:
        """How many large files were sent."""
        return sum(request.startswith("PUT ") for request in self.requests)

    def answer(self, method: str, path: str, body: bytes, token: str) -> Any:
        """Return the JSON answer to a request."""
        if method == "PUT":
            return self._store(path.rpartition("/")[2], body)
        if token not in (WRITER, READER):
            raise Refusal(401, "Invalid credentials in Authorization header")
        if path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        if method == "POST" and token == READER:
            raise Refusal(403, "You don't have the required permissions")
        if path == "/api/repos/create":
            return self._create(json.loads(body))
        if path.endswith(".git/info/lfs/objects/batch"):
            return {"transfer": "basic", "objects": [self._batch(each) for each in json.loads(body)["objects"]]}
        owner, name, action, *rest = [*path.removeprefix("/api/models/").split("/"), ""]
        repo = self.repos.get(f"{owner}/{name}")
        if repo is None:
            raise Refusal(404, "Repository not found")
        if action == "refs":
            branches = [{"name": b, "ref": f"refs/heads/{b}", "targetCommit": sha} for b, sha in repo.heads.items()]
            return {"branches": branches, "tags": [], "converts": []}
        branch = rest[0] if rest and rest[0] else "main"
        if action == "branch":
            repo.branches[branch] = dict(repo.branches["main"])
            repo.heads[branch] = repo.heads["main"]
            return {}
        if branch not in repo.branches:
            raise Refusal(404, f"Invalid rev id: {branch}")
        if action in ("", "revision"):
            siblings = [{"rfilename": file} for file in repo.branches[branch]]
            return {"id": f"{owner}/{name}", "sha": repo.heads[branch], "private": repo.private, "siblings": siblings}
        if action == "preupload":
            return {"files": [self._mode(each["path"]) for each in json.loads(body)["files"]]}
        if action == "commit":
            return self._commit(f"{owner}/{name}", repo, branch, [json.loads(line) for line in body.splitlines()])
        raise Refusal(501, f"the stub knows no {method} {path}")

    def _create(self, asked: dict[str, Any]) -> dict[str, str]:
        repo = f"{asked['organization']}/{asked['name']}"
        if repo in self.repos:
            raise Refusal(409, "You already created this model repo", url=f"{self.url}/{repo}")
        self.repos[repo] = Repo(private=bool(asked.get("private")) or asked.get("visibility") == "private")
        return {"url": f"{self.url}/{repo}"}

    def _mode(self, path: str) -> dict[str, Any]:
        return {"path": path, "uploadMode": "lfs" if path.endswith(LFS_SUFFIXES) else "regular", "shouldIgnore": False}

    def _batch(self, asked: dict[str, Any]) -> dict[str, Any]:
        known = {"oid": asked["oid"], "size": asked["size"]}
        if asked["oid"] in self.stored:
            return known
        return known | {"actions": {"upload": {"href": f"{self.url}/lfs/{asked['oid']}"}}}

    def _store(self, oid: str, body: bytes) -> None:
        if oid in self.refuse_lfs:
            raise Refusal(400, "the stub was told to refuse this file")
        if sha256(body).hexdigest() != oid:
            raise Refusal(422, "the bytes are not those that were announced")
        self.stored[oid] = body

    def _commit(self, name: str, repo: Repo, branch: str, lines: list[dict[str, Any]]) -> dict[str, str]:
        header, files = lines[0]["value"], dict(repo.branches[branch])
        if header.get("parentCommit") not in (None, repo.heads[branch]):
            raise Refusal(412, "A commit has happened since")
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.stored[value["oid"]]
            else:
                del files[value["path"]]
        self.commits.append(header["summary"])
        repo.branches[branch], repo.heads[branch] = files, sha1(repr(self.commits).encode()).hexdigest()
        sha = repo.heads[branch]
        return {"commitUrl": f"{self.url}/{name}/commit/{sha}", "commitOid": sha}


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Give a hub that listens until the block ends."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def _handle(self) -> None:
            path = self.path.partition("?")[0]
            hub.requests.append(f"{self.command} {path}")
            body = self._body()
            token = self.headers.get("Authorization", "").removeprefix("Bearer ")
            try:
                status, answer = 200, hub.answer(self.command, path, body, token)
            except Refusal as refusal:
                status, answer = refusal.status, refusal.answer
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        do_GET = do_POST = do_PUT = _handle  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
