"""A server that speaks the part of the Hub's protocol that loading and pushing models uses, in memory.

The client keeps a model's big files in Xet storage wherever the package `hf_xet` is installed, without asking the
server. Xet is not spoken here: set HF_HUB_DISABLE_XET=1, and the client uses Git LFS over HTTP.
"""

import base64
import dataclasses
import fnmatch
import hashlib
import http.server
import json
import re
import threading
import urllib.parse
from typing import Any

import yaml
from huggingface_hub.repocard_data import model_index_to_eval_results

# From the Hub's `.gitattributes`; files that match are stored by LFS.
LFS_PATTERNS = ("*.safetensors", "*.bin", "*.pt", "*.png", "*.gz", "*.zip")
# Some of the identifiers that the Hub accepts.
LICENSES = {"apache-2.0", "mit", "bsd-3-clause", "cc-by-4.0", "cc-by-sa-4.0", "gpl-3.0", "openrail", "other", "unknown"}
# Tokens, and whose they are.
TOKENS = {"hf_me": "me", "hf_other": "other"}
REPOSITORY = r"/(?P<repo>[\w.-]+/[\w.-]+?)"
API = rf"/api/models{REPOSITORY}"


class Refused(Exception):
    """An answer with an error: status, the Hub's code, and a message."""

    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(status, code, message)
        self.status, self.code, self.message = status, code, message


@dataclasses.dataclass
class File:
    content: bytes
    lfs: bool

    @property
    def oid(self) -> str:
        """The identifier of a Git blob; for LFS that of the pointer."""
        stored = self.pointer if self.lfs else self.content
        return hashlib.sha1(b"blob %d\0" % len(stored) + stored).hexdigest()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def pointer(self) -> bytes:
        lines = ("version https://git-lfs.github.com/spec/v1", f"oid sha256:{self.sha256}", f"size {len(self.content)}")
        return "".join(f"{line}\n" for line in lines).encode()

    def entry(self, path: str) -> dict[str, Any]:
        entry = {"type": "file", "path": path, "size": len(self.content), "oid": self.oid}
        lfs = {"oid": self.sha256, "size": len(self.content), "pointerSize": len(self.pointer)}
        return {**entry, "lfs": lfs} if self.lfs else entry


@dataclasses.dataclass
class Commit:
    oid: str
    title: str
    files: dict[str, File]
    # The names of files that this commit added or changed.
    written: list[str]


class Repository:
    def __init__(self, name: str, private: bool) -> None:
        self.name, self.private = name, private
        self.commits: list[Commit] = []
        self.branches: dict[str, str] = {}
        self.tags: dict[str, str] = {}
        self.commit("main", "initial commit", {".gitattributes": File(b"*.safetensors filter=lfs\n", lfs=False)})

    def commit(self, branch: str, title: str, files: dict[str, File], written: tuple[str, ...] = ()) -> Commit:
        oid = hashlib.sha1(json.dumps([self.name, title, len(self.commits)]).encode()).hexdigest()
        self.commits.append(Commit(oid, title, files, list(written)))
        self.branches[branch] = oid
        return self.commits[-1]

    def at(self, revision: str) -> Commit:
        oid = self.branches.get(revision) or self.tags.get(revision) or revision
        for commit in self.commits:
            if commit.oid == oid:
                return commit
        raise Refused(404, "RevisionNotFound", f"Invalid rev id: {revision}")

    @property
    def files(self) -> dict[str, bytes]:
        """What is on the branch `main`."""
        return {path: file.content for path, file in self.at("main").files.items()}


class Hub:
    """The server; use it in a `with` statement.

    Attributes:
        url: what HF_ENDPOINT must be.
        repositories: by their names.
        requests: the method and the path of every request, and whether it had a token.
        unknown: those that this server does not know.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str, bool]] = []
        self.unknown: list[tuple[str, str]] = []
        hub = self

        class Handler(_Handler):
            def log_message(self, *args: Any) -> None:
                pass

            def answer(self) -> None:
                hub.answer(self)

            do_GET = do_HEAD = do_POST = do_PUT = answer

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def answer(self, request: "_Handler") -> None:
        """Reads a request and answers it."""
        path, _, query = request.path.partition("?")
        path = urllib.parse.unquote(path)
        request.body = request.read_body()
        request.query = urllib.parse.parse_qs(query)
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        self.requests.append((request.command, path, bool(token)))
        try:
            if token and token not in TOKENS:
                raise Refused(401, "", "Invalid credentials in Authorization header")
            for methods, pattern, action in self.ROUTES:
                if request.command in methods.split() and (found := re.fullmatch(pattern, path)):
                    return action(self, request, TOKENS.get(token), **found.groupdict())
            self.unknown.append((request.command, path))
            raise Refused(404, "", f"no such page: {path}")
        except Refused as refused:
            headers = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
            request.reply({"error": refused.message}, refused.status, {k: v for k, v in headers.items() if v})

    def repository(self, name: str, user: str | None, write: bool = False) -> Repository:
        """Returns a repository that this user may read or write. A private one of others does not exist for them."""
        repository, owned = self.repositories.get(name), name.partition("/")[0] == user
        if repository is None or (repository.private and not owned):
            status, message = (404, "Repository not found") if user else (401, "Invalid username or password.")
            raise Refused(status, "RepoNotFound", message)
        if write and not owned:
            raise Refused(403 if user else 401, "", f"You do not have the rights to write to {name}.")
        return repository

    def whoami(self, request: "_Handler", user: str | None) -> None:
        if user is None:
            raise Refused(401, "", "Invalid username or password.")
        request.reply({"type": "user", "name": user, "orgs": [], "auth": {"type": "access_token"}})

    def create(self, request: "_Handler", user: str | None) -> None:
        given = json.loads(request.body)
        owner = given.get("organization") or user
        if user is None or owner != user:
            raise Refused(403 if user else 401, "", "You do not have the rights to create a model here.")
        name = f"{owner}/{given['name']}"
        url = {"url": f"{self.url}/{name}", "name": name}
        if name in self.repositories:
            return request.reply({**url, "error": "You already created this model repo"}, 409)
        # Versions of the client before 2.0 send `private`.
        private = given.get("visibility") == "private" or bool(given.get("private"))
        self.repositories[name] = Repository(name, private)
        request.reply(url)

    def validate(self, request: "_Handler", user: str | None) -> None:
        errors = card_errors(json.loads(request.body)["content"])
        request.reply({"errors": [{"message": error} for error in errors], "warnings": []}, 400 if errors else 200)

    def preupload(self, request: "_Handler", user: str | None, repo: str, revision: str) -> None:
        files = self.repository(repo, user, write=True).at(revision).files
        answers = []
        for given in json.loads(request.body)["files"]:
            path = given["path"]
            lfs = given["size"] >= 10_000_000 or any(fnmatch.fnmatch(path, pattern) for pattern in LFS_PATTERNS)
            answer = {"path": path, "uploadMode": "lfs" if lfs else "regular", "shouldIgnore": False}
            if path in files:
                # The client leaves out what has not changed.
                answer["oid"] = files[path].sha256 if files[path].lfs else files[path].oid
            answers.append(answer)
        request.reply({"files": answers})

    def batch(self, request: "_Handler", user: str | None, repo: str) -> None:
        self.repository(repo, user, write=True)
        objects = []
        for given in json.loads(request.body)["objects"]:
            verify = {"href": f"{self.url}/{repo}.git/info/lfs/objects/verify"}
            actions = {"upload": {"href": f"{self.url}/storage/{given['oid']}"}, "verify": verify}
            objects.append({**given, "actions": actions} if given["oid"] not in self.objects else given)
        request.reply({"transfer": "basic", "objects": objects})

    def verify(self, request: "_Handler", user: str | None, repo: str) -> None:
        self.repository(repo, user, write=True)
        given = json.loads(request.body)
        if len(self.objects.get(given["oid"], b"")) != given["size"]:
            raise Refused(422, "", "The object was not uploaded.")
        request.reply({})

    def store(self, request: "_Handler", user: str | None, oid: str) -> None:
        if hashlib.sha256(request.body).hexdigest() != oid:
            raise Refused(400, "", "The content does not have this SHA-256.")
        self.objects[oid] = request.body
        request.reply({})

    def stored(self, request: "_Handler", user: str | None, oid: str) -> None:
        request.send(200, self.objects[oid])

    def commit(self, request: "_Handler", user: str | None, repo: str, revision: str) -> None:
        repository = self.repository(repo, user, write=True)
        if revision not in repository.branches:
            raise Refused(404, "RevisionNotFound", f"{revision} is not a branch.")
        old = repository.at(revision)
        files, written, title = dict(old.files), [], ""
        for line in request.body.splitlines():
            key, value = (operation := json.loads(line))["key"], operation["value"]
            if key == "header":
                title = value["summary"]
                if value.get("parentCommit", old.oid) != old.oid:
                    raise Refused(412, "", "A commit has happened since.")
            elif key == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), lfs=False)
                written.append(value["path"])
            elif key == "lfsFile":
                files[value["path"]] = File(self.objects[value["oid"]], lfs=True)
                written.append(value["path"])
            elif key == "deletedFile":
                del files[value["path"]]
            else:
                raise Refused(400, "", f"unknown operation {key!r}")
        if "README.md" in written and (errors := card_errors(files["README.md"].content.decode())):
            raise Refused(400, "", "; ".join(errors))
        commit = repository.commit(revision, title, files, tuple(written))
        request.reply({"success": True, "commitOid": commit.oid, "commitUrl": f"{self.url}/{repo}/commit/{commit.oid}"})

    def branch(self, request: "_Handler", user: str | None, repo: str, name: str) -> None:
        repository = self.repository(repo, user, write=True)
        if name in repository.branches:
            raise Refused(409, "", "Reference already exists")
        repository.branches[name] = repository.at(json.loads(request.body).get("startingPoint", "main")).oid
        request.reply({})

    def tag(self, request: "_Handler", user: str | None, repo: str, revision: str) -> None:
        repository, name = self.repository(repo, user, write=True), json.loads(request.body)["tag"]
        if name in repository.tags:
            raise Refused(409, "", "Tag reference exists already")
        repository.tags[name] = repository.at(revision).oid
        request.reply({})

    def refs(self, request: "_Handler", user: str | None, repo: str) -> None:
        repository = self.repository(repo, user)
        kinds = {"branches": ("heads", repository.branches), "tags": ("tags", repository.tags), "converts": ("", {})}
        request.reply(
            {
                kind: [{"name": n, "ref": f"refs/{folder}/{n}", "targetCommit": oid} for n, oid in names.items()]
                for kind, (folder, names) in kinds.items()
            }
        )

    def info(self, request: "_Handler", user: str | None, repo: str, revision: str | None = None) -> None:
        repository = self.repository(repo, user)
        commit = repository.at(revision or "main")
        about = {"_id": repo, "id": repo, "modelId": repo, "sha": commit.oid, "private": repository.private}
        card = commit.files.get("README.md")
        metadata = read_metadata(card.content.decode()) if card is not None else {}
        siblings = [{"rfilename": path} for path in commit.files]
        request.reply({**about, "siblings": siblings, "cardData": metadata, "tags": metadata.get("tags", [])})

    def tree(self, request: "_Handler", user: str | None, repo: str, revision: str, folder: str | None = None) -> None:
        files, prefix = self.repository(repo, user).at(revision).files, f"{folder}/" if folder else ""
        entries = [file.entry(path) for path, file in files.items() if path.startswith(prefix)]
        if folder and not entries:
            raise Refused(404, "EntryNotFound", f"{folder} does not exist on {revision!r}")
        request.reply(entries)

    def paths_info(self, request: "_Handler", user: str | None, repo: str, revision: str) -> None:
        files = self.repository(repo, user).at(revision).files
        paths = urllib.parse.parse_qs(request.body.decode())["paths"]
        request.reply([files[path].entry(path) for path in paths if path in files])

    def resolve(self, request: "_Handler", user: str | None, repo: str, revision: str, path: str) -> None:
        commit = self.repository(repo, user).at(revision)
        headers = {"X-Repo-Commit": commit.oid}
        file = commit.files.get(path)
        if file is None:
            missing = {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            return request.reply({"error": "Entry not found"}, 404, {**headers, **missing})
        if not file.lfs:
            return request.send(200, file.content, {**headers, "ETag": f'"{file.oid}"'})
        # As on the Hub, another host serves these, which must not be sent a token.
        linked = {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(len(file.content))}
        location = f"http://localhost:{self.port}/storage/{file.sha256}"
        request.send(302, b"", {**headers, **linked, "Location": location})

    ROUTES: Any = (
        ("GET", r"/api/whoami-v2", whoami),
        ("POST", r"/api/repos/create", create),
        ("POST", r"/api/validate-yaml", validate),
        ("POST", rf"{API}/preupload/(?P<revision>.+)", preupload),
        ("POST", rf"{API}/commit/(?P<revision>.+)", commit),
        ("POST", rf"{API}/branch/(?P<name>.+)", branch),
        ("POST", rf"{API}/tag/(?P<revision>.+)", tag),
        ("POST", rf"{API}/paths-info/(?P<revision>.+)", paths_info),
        ("GET", rf"{API}/refs", refs),
        ("GET", rf"{API}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", tree),
        ("GET", rf"{API}/revision/(?P<revision>.+)", info),
        ("GET", API, info),
        ("POST", rf"{REPOSITORY}\.git/info/lfs/objects/batch", batch),
        ("POST", rf"{REPOSITORY}\.git/info/lfs/objects/verify", verify),
        ("PUT", r"/storage/(?P<oid>\w+)", store),
        ("GET HEAD", r"/storage/(?P<oid>\w+)", stored),
        ("GET HEAD", rf"{REPOSITORY}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", resolve),
    )


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    body: bytes
    query: dict[str, list[str]]

    def read_body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def reply(self, value: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        """Answers with JSON."""
        self.send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def send(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


def read_metadata(card: str) -> dict[str, Any]:
    """Returns the metadata at the head of a card."""
    found = re.match(r"---\n(.*?)\n---\n", card, flags=re.DOTALL)
    return yaml.safe_load(found[1]) if found else {}


def card_errors(card: str) -> list[str]:
    """Returns what the Hub would say is wrong with the metadata of a card, by the rules of its documentation."""
    try:
        data = read_metadata(card)
    except yaml.YAMLError as error:
        return [f"the metadata are not YAML: {error}"]
    errors = []
    license = data.get("license", "unknown")
    if license not in LICENSES or (license == "other" and not data.get("license_name")):
        errors.append(f"license {license!r} must be one of {sorted(LICENSES)}, and 'other' needs a license_name")
    for name in ("tags", "datasets"):
        if not all(isinstance(one, str) for one in data.get(name) or []):
            errors.append(f"{name!r} must be a list of strings")
    if "model-index" in data:
        try:
            _, results = model_index_to_eval_results(data["model-index"])
        except (KeyError, TypeError) as error:
            return [*errors, f"'model-index' is not valid: {error!r}"]
        for result in results:
            texts = (result.task_type, result.dataset_type, result.dataset_name, result.metric_type)
            if not all(isinstance(text, str) and text for text in texts) or result.metric_value is None:
                errors.append(f"'model-index' has an incomplete result: {result}")
    return errors
