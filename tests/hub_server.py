"""A small Hub on localhost: the part of the Hub's HTTP protocol by which huggingface_hub uploads and downloads models.

Repositories live in memory, each with one list of commits a branch. Uploads go as the Hub asks for them: small text files in the
commit itself, everything else through Git LFS (batch, PUT, verify). Downloads of LFS files are redirected, as by the Hub to its
CDN. Xet is not spoken, so the client has to have HF_HUB_DISABLE_XET=1.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

USER = "tester"
TOKEN = "hf_localhost"
TEXT_FILES = (".json", ".md", ".txt", ".jinja", ".gitattributes", ".py")
NAME = r"[\w.-]+/[\w.-]+"


@dataclass
class Commit:
    """A whole tree: content by path, and which of the paths are LFS files."""

    files: dict[str, bytes]
    lfs: set[str]
    message: str

    @property
    def sha(self) -> str:
        names = "".join(f"{path}{hashlib.sha1(data).hexdigest()}" for path, data in sorted(self.files.items()))
        return hashlib.sha1((self.message + names).encode()).hexdigest()


@dataclass
class Repository:
    """Commits by branch, oldest first."""

    private: bool = False
    branches: dict[str, list[Commit]] = field(default_factory=lambda: {"main": [Commit({}, set(), "initial commit")]})

    def find(self, revision: str) -> Commit | None:
        """The tip of a branch, or a commit by its sha."""
        if revision in self.branches:
            return self.branches[revision][-1]
        return next((c for commits in self.branches.values() for c in commits if c.sha == revision), None)


class LocalHub:
    """The server's state, for tests to look at.

    Attributes:
        url: what HF_ENDPOINT has to be.
        repositories: by id.
        requests: "METHOD path" of everything that was asked, in order.
        unknown: those among them that this server does not know: a test asserts that there are none.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.unknown: list[str] = []
        self.lock = threading.Lock()
        self.url = ""

    def files(self, repo_id: str, revision: str = "main") -> dict[str, bytes]:
        """What a repository holds."""
        commit = self.repositories[repo_id].find(revision)
        assert commit is not None
        return commit.files

    def environment(self, home: Path) -> dict[str, str]:
        """Environment variables under which a process uses this Hub alone, with an empty cache of its own."""
        removed = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE")
        return {key: value for key, value in os.environ.items() if key not in removed} | {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "NO_PROXY": "127.0.0.1,localhost",
        }


@contextmanager
def serve() -> Iterator[LocalHub]:
    """Run a Hub in a thread for the length of the block."""
    hub = LocalHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Refused(Exception):
    """An answer other than success: status, the Hub's X-Error-Code and a message."""

    def __init__(self, status: int, code: str, message: str) -> None:
        self.status, self.code, self.message = status, code, message


class _Handler(BaseHTTPRequestHandler):
    hub: LocalHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        """Silent: the requests are kept in the hub."""

    def do_GET(self) -> None:
        self._handle()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _handle(self) -> None:
        body = self._read_body()
        path = urllib.parse.unquote(urllib.parse.urlparse(self.path).path)
        with self.hub.lock:
            self.hub.requests.append(f"{self.command} {path}")
            try:
                for methods, pattern, answer in _ROUTES:
                    match = re.fullmatch(pattern, path)
                    if match is not None and self.command in methods.split():
                        if self.command not in ("GET", "HEAD") or "/api/whoami" in path:
                            self._check_token()
                        answer(self, body, **match.groupdict())
                        return
                self.hub.unknown.append(f"{self.command} {path}")
                raise _Refused(404, "", f"no such endpoint: {self.command} {path}")
            except _Refused as error:
                self._send(
                    {"error": error.message},
                    error.status,
                    {"X-Error-Code": error.code, "X-Error-Message": error.message},
                )

    def _read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _check_token(self) -> None:
        # What the LFS batch hands out is a link that is its own permission.
        if self.headers.get("Authorization") != f"Bearer {TOKEN}" and not self.path.startswith("/lfs/"):
            raise _Refused(401, "", "Invalid username or password.")

    def _send(self, content: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        for name, value in {"Content-Type": kind, "Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _repository(self, repo: str) -> Repository:
        if repo not in self.hub.repositories:
            raise _Refused(404, "RepoNotFound", "Repository not found")
        return self.hub.repositories[repo]

    def _commit_at(self, repo: str, revision: str) -> Commit:
        commit = self._repository(repo).find(revision)
        if commit is None:
            raise _Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit

    def whoami(self, body: bytes) -> None:
        self._send(
            {"type": "user", "name": USER, "fullname": USER, "orgs": [], "auth": {"accessToken": {"role": "write"}}}
        )

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        repo = f"{asked.get('organization') or USER}/{asked['name']}"
        url = f"{self.hub.url}/{repo}"
        if repo in self.hub.repositories:
            self._send({"error": "You already created this model repo", "url": url}, 409)
            return
        private = asked.get("visibility") == "private" or bool(asked.get("private"))  # the old word for it
        self.hub.repositories[repo] = Repository(private)
        self._send({"url": url, "id": repo, "name": repo})

    def create_branch(self, body: bytes, repo: str, revision: str) -> None:
        branches = self._repository(repo).branches
        if revision in branches:
            raise _Refused(409, "", "Reference already exists")
        branches[revision] = list(branches["main"])
        self._send({})

    def validate(self, body: bytes) -> None:
        assert json.loads(body)["content"].startswith("---\n"), "a card without front matter"
        self._send({"errors": [], "warnings": []})

    def preupload(self, body: bytes, repo: str, revision: str) -> None:
        self._commit_at(repo, revision)
        modes = []
        for file in json.loads(body)["files"]:
            text = file["path"].endswith(TEXT_FILES) and b"\0" not in base64.b64decode(file.get("sample", ""))
            modes.append({"path": file["path"], "uploadMode": "regular" if text else "lfs", "shouldIgnore": False})
        self._send({"files": modes})

    def lfs_batch(self, body: bytes, repo: str) -> None:
        self._repository(repo)
        asked = json.loads(body)
        assert asked["operation"] == "upload" and "basic" in asked["transfers"]
        objects = []
        for item in asked["objects"]:
            entry: dict[str, Any] = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.hub.objects:
                href = f"{self.hub.url}/lfs/{item['oid']}"
                entry["actions"] = {"upload": {"href": href}, "verify": {"href": f"{href}/verify"}}
            objects.append(entry)
        self._send({"transfer": "basic", "objects": objects})

    def lfs_put(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Refused(400, "", "the content does not have this hash")
        self.hub.objects[oid] = body
        self._send(b"")

    def lfs_verify(self, body: bytes, oid: str) -> None:
        if len(self.hub.objects.get(oid, b"")) != json.loads(body)["size"]:
            raise _Refused(404, "", "no such object")
        self._send({})

    def lfs_get(self, body: bytes, oid: str) -> None:
        self._send_file(self.hub.objects[oid], {"ETag": f'"{oid}"'})

    def commit(self, body: bytes, repo: str, revision: str) -> None:
        parent = self._commit_at(repo, revision)
        files, lfs, message = dict(parent.files), set(parent.lfs), ""
        for line in body.decode().splitlines():
            item = json.loads(line)
            value = item["value"]
            if item["key"] == "header":
                message = value["summary"]
            elif item["key"] == "file":
                assert value["encoding"] == "base64"
                files[value["path"]] = base64.b64decode(value["content"])
                lfs.discard(value["path"])
            elif item["key"] == "lfsFile":
                assert value["algo"] == "sha256"
                if value["oid"] not in self.hub.objects:
                    raise _Refused(400, "", f"the LFS object of {value['path']} was not uploaded")
                files[value["path"]] = self.hub.objects[value["oid"]]
                lfs.add(value["path"])
            elif item["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise _Refused(400, "", f"unknown operation {item['key']}")
        made = Commit(files, lfs, message)
        self._repository(repo).branches[revision].append(made)
        url = f"{self.hub.url}/{repo}/commit/{made.sha}"
        self._send({"success": True, "commitOid": made.sha, "commitUrl": url, "hookOutput": ""})

    def info(self, body: bytes, repo: str, revision: str = "main") -> None:
        commit = self._commit_at(repo, revision)
        siblings = [{"rfilename": path} for path in sorted(commit.files)]
        private = self._repository(repo).private
        self._send(
            {"_id": "0" * 24, "id": repo, "modelId": repo, "sha": commit.sha, "private": private, "siblings": siblings}
            | {"tags": [], "downloads": 0, "likes": 0, "createdAt": "2026-01-01T00:00:00.000Z"}
        )

    def tree(self, body: bytes, repo: str, revision: str, folder: str | None = None) -> None:
        commit = self._commit_at(repo, revision)
        paths = [path for path in sorted(commit.files) if folder is None or path.startswith(f"{folder}/")]
        if folder is not None and not paths:
            raise _Refused(404, "EntryNotFound", f"{folder} does not exist")
        self._send([_tree_entry(commit, path) for path in paths])

    def paths_info(self, body: bytes, repo: str, revision: str) -> None:
        commit = self._commit_at(repo, revision)
        form = urllib.parse.parse_qs(body.decode())
        asked = form.get("paths") or (json.loads(body)["paths"] if body.startswith(b"{") else [])
        self._send([_tree_entry(commit, path) for path in asked if path in commit.files])

    def resolve(self, body: bytes, repo: str, revision: str, path: str) -> None:
        commit = self._commit_at(repo, revision)
        if path not in commit.files:
            raise _Refused(404, "EntryNotFound", f"Entry not found: {path}")
        data = commit.files[path]
        headers = {"X-Repo-Commit": commit.sha, "Accept-Ranges": "bytes"}
        if path not in commit.lfs:
            self._send_file(data, headers | {"ETag": f'"{_blob_sha(data)}"'})
            return
        oid = hashlib.sha256(data).hexdigest()
        # The client follows a redirect within the Hub and stops at one to another host, as the CDN is.
        elsewhere = self.hub.url.replace("127.0.0.1", "localhost")
        linked = {"X-Linked-Etag": f'"{oid}"', "X-Linked-Size": str(len(data)), "Location": f"{elsewhere}/lfs/{oid}"}
        self._send(b"", 302, headers | linked)

    def _send_file(self, data: bytes, headers: dict[str, str]) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked is None:
            self._send(data, 200, headers)
            return
        first, last = int(asked[1]), int(asked[2] or len(data) - 1)
        part = data[first : last + 1]
        self._send(part, 206, headers | {"Content-Range": f"bytes {first}-{first + len(part) - 1}/{len(data)}"})


def _blob_sha(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _tree_entry(commit: Commit, path: str) -> dict[str, Any]:
    data = commit.files[path]
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(data), "oid": _blob_sha(data)}
    if path in commit.lfs:
        entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return entry


_ROUTES: list[tuple[str, str, Any]] = [
    ("GET", r"/api/whoami-v2", _Handler.whoami),
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", r"/api/validate-yaml", _Handler.validate),
    ("POST", rf"/api/models/(?P<repo>{NAME})/preupload/(?P<revision>.+)", _Handler.preupload),
    ("POST", rf"/api/models/(?P<repo>{NAME})/commit/(?P<revision>.+)", _Handler.commit),
    ("POST", rf"/api/models/(?P<repo>{NAME})/branch/(?P<revision>.+)", _Handler.create_branch),
    ("POST", rf"/api/models/(?P<repo>{NAME})/paths-info/(?P<revision>[^/]+)", _Handler.paths_info),
    ("GET", rf"/api/models/(?P<repo>{NAME})/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", _Handler.tree),
    ("GET", rf"/api/models/(?P<repo>{NAME})/revision/(?P<revision>.+)", _Handler.info),
    ("GET", rf"/api/models/(?P<repo>{NAME})", _Handler.info),
    ("POST", rf"/(?P<repo>{NAME})\.git/info/lfs/objects/batch", _Handler.lfs_batch),
    ("PUT", r"/lfs/(?P<oid>[0-9a-f]{64})", _Handler.lfs_put),
    ("POST", r"/lfs/(?P<oid>[0-9a-f]{64})/verify", _Handler.lfs_verify),
    ("GET HEAD", r"/lfs/(?P<oid>[0-9a-f]{64})", _Handler.lfs_get),
    ("GET HEAD", rf"/(?P<repo>{NAME})/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve),
]
