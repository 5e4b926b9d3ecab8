"""A real API server of Kubernetes and its etcd: what records need of a cluster, so no pods."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import httpx
import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tests.coordination.api_server import CRD, GROUP, MANIFESTS, PLURAL, VERSION
from tests.coordination.kubernetes_client import write_kubeconfig

PROGRAMS = ("kube-apiserver", "etcd")
_ADMIN = "an-administrator-s-token"
_START_S = 60.0
_ISSUER = "https://issuer.local"
_PLURALS = {"ServiceAccount": "serviceaccounts", "Role": "roles", "RoleBinding": "rolebindings"}


@dataclass(frozen=True)
class Cluster:
    """Where it is; `admin` may everything."""

    admin: httpx.Client
    directory: Path

    @classmethod
    @contextmanager
    def running(cls, directory: Path) -> Iterator[Self]:
        """With hearthnet's definition of a ModelMetadata. Skips where the programs are missing."""
        if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
            pytest.skip(
                "a real Kubernetes is what this tests, and the PATH has no "
                + " and no ".join(missing)
            )
        with ExitStack() as stack:
            store = _started_etcd(directory, stack)
            port = _started_server(directory, store, stack)
            authority = directory / "certs" / "apiserver.crt"
            _wait(authority.exists)
            admin = httpx.Client(
                base_url=f"https://127.0.0.1:{port}",
                verify=False,  # noqa: S501 - the certificate is the server's own
                headers={"Authorization": f"Bearer {_ADMIN}"},
                trust_env=False,
            )
            cluster = cls(stack.enter_context(admin), directory)
            _wait(lambda: cluster.answers("/readyz"))
            cluster.post("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", CRD)
            _wait(lambda: cluster.answers(cluster.resources("default")))
            yield cluster

    def answers(self, path: str) -> bool:
        """Whether it does, and well."""
        try:
            return self.admin.get(path).is_success
        except httpx.TransportError:
            return False

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Create an object."""
        answer = self.admin.post(path, json=body)
        assert answer.is_success, answer.text
        created: dict[str, Any] = answer.json()
        return created

    def resources(self, namespace: str) -> str:
        """Where the ModelMetadata of a namespace are."""
        return f"/apis/{GROUP}/{VERSION['name']}/namespaces/{namespace}/{PLURAL}"

    def new_namespace(self, name: str, *, roles: bool = True) -> Path:
        """With what `rbac.yaml` allows, or with nothing; the kubeconfig of a node in it."""
        self.post("/api/v1/namespaces", {"metadata": {"name": name}})
        for manifest in yaml.safe_load_all((MANIFESTS / "rbac.yaml").read_text("utf-8")):
            if roles or manifest["kind"] == "ServiceAccount":
                self._apply(name, manifest)
        account = f"/api/v1/namespaces/{name}/serviceaccounts/hearthnet/token"
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {}}
        token = self.post(account, request)["status"]["token"]
        file = self.directory / f"kubeconfig-{name}"
        return write_kubeconfig(file, str(self.admin.base_url), self.authority, token)

    @property
    def authority(self) -> Path:
        """The file of the server's certificate, which is its own."""
        return self.directory / "certs" / "apiserver.crt"

    def _apply(self, namespace: str, manifest: dict[str, Any]) -> None:
        version, kind = manifest["apiVersion"], manifest["kind"]
        group = "/api/v1" if version == "v1" else f"/apis/{version}"
        self.post(f"{group}/namespaces/{namespace}/{_PLURALS[kind]}", manifest)


def _started_etcd(directory: Path, stack: ExitStack) -> str:
    store, peers = _free_address(), _free_address()
    _start(
        [
            "etcd", "--data-dir", str(directory / "etcd"),
            "--listen-client-urls", store, "--advertise-client-urls", store,
            "--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers,
            "--initial-cluster", f"default={peers}",
        ],
        directory / "etcd.log",
        stack,
    )  # fmt: skip
    return store


def _started_server(directory: Path, store: str, stack: ExitStack) -> int:
    port = int(_free_address().rpartition(":")[2])
    key = directory / "accounts.pem"
    key.write_bytes(
        rsa.generate_private_key(65537, 2048).private_bytes(
            Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption()
        )
    )
    tokens = directory / "tokens.csv"
    tokens.write_text(f"{_ADMIN},admin,1,system:masters\n", "utf-8")
    _start(
        [
            "kube-apiserver", "--etcd-servers", store,
            "--bind-address", "127.0.0.1", "--secure-port", str(port),
            "--cert-dir", str(directory / "certs"), "--token-auth-file", str(tokens),
            "--authorization-mode", "RBAC", "--service-cluster-ip-range", "10.0.0.0/24",
            "--service-account-issuer", _ISSUER, "--api-audiences", _ISSUER,
            "--service-account-key-file", str(key), "--service-account-signing-key-file", str(key),
            "--disable-admission-plugins", "ServiceAccount",  # nobody issues their secrets here
        ],
        directory / "server.log",
        stack,
    )  # fmt: skip
    return port


def _start(command: list[str], log: Path, stack: ExitStack) -> None:
    output = stack.enter_context(log.open("wb"))
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    stack.callback(process.wait, 20)
    stack.callback(process.kill)


def _free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def _wait(holds: Any) -> None:
    deadline = time.monotonic() + _START_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)
