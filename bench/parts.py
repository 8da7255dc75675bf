"""Starting what is measured: a made-up API server, and the extender as people run it, as processes."""

import contextlib
import http.client
import os
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.cluster import ports

ROOT = Path(__file__).resolve().parents[1]

_KUBECONFIG = """\
apiVersion: v1
kind: Config
current-context: bench
clusters: [{{name: bench, cluster: {{server: "http://127.0.0.1:{port}"}}}}]
users: [{{name: bench, user: {{}}}}]
contexts: [{{name: bench, context: {{cluster: bench, user: bench}}}}]
"""


@dataclass(frozen=True)
class Extender:
    """`pid` is the serving process. `ready_seconds`: from the start of the process to its first answer."""

    port: int
    pid: int
    ready_seconds: float
    metrics_port: int = 0

    def rss_mib(self) -> tuple[float, float]:
        """Resident memory now and at its peak."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith("Vm")}
        return int(found["VmRSS"]) / 1024, int(found["VmHWM"]) / 1024

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def world(nodes: int, pods: int, classes: int = 0, *, fresh: bool = False) -> Iterator[Path]:
    """A kubeconfig of a made-up API server of this size; `fresh`: no status of a card is written yet."""
    with tempfile.TemporaryDirectory(prefix="cardwise-bench-") as directory:
        port_file = Path(directory) / "port"
        arguments = [sys.executable, "-m", "bench.worldserver", str(nodes), str(pods), str(classes), str(port_file)]
        arguments += ["--fresh"] * fresh
        with subprocess.Popen(arguments, cwd=ROOT) as process:
            try:
                while not port_file.exists():
                    if process.poll() is not None:
                        raise RuntimeError("the made-up API server did not start")
                    time.sleep(0.05)
                kubeconfig = Path(directory) / "kubeconfig"
                kubeconfig.write_text(_KUBECONFIG.format(port=port_file.read_text()))
                yield kubeconfig
            finally:
                process.kill()


@contextlib.contextmanager
def compiled() -> Iterator[dict[str, str]]:
    """An environment in which Python finds all modules compiled, as pip leaves them in an image."""
    with tempfile.TemporaryDirectory(prefix="cardwise-bench-") as directory:
        env = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
        env["PYTHONPYCACHEPREFIX"] = directory
        imports = "import extender.__main__, kubernetes.config, kubernetes.client; kubernetes.client.Configuration()"
        subprocess.run([sys.executable, "-c", imports], cwd=ROOT, env=env, check=True)
        yield env


@contextlib.contextmanager
def extender(
    kubeconfig: Path, *options: str, env: dict[str, str] | None = None, tls: Path | None = None, code: Path = ROOT
) -> Iterator[Extender]:
    """The extender of the checkout `code`, ready: on plain HTTP, or on mutual TLS with its certificates in `tls`."""
    port, metrics = ports.free(2)
    arguments = [sys.executable, "-m", "extender", "--kubeconfig", str(kubeconfig), "--no-lease"]
    arguments += ["--plain-http"] if tls is None else ["--tls-dir", str(tls)]
    arguments += ["--bind", f"127.0.0.1:{port}", "--metrics-bind", f"127.0.0.1:{metrics}", "--log-level", "warning"]
    began = time.monotonic()
    with subprocess.Popen([*arguments, *options], cwd=code, env=env) as process:
        try:
            while not _ready(metrics):
                if process.poll() is not None:
                    raise RuntimeError("the extender did not start")
                time.sleep(0.02)
            seconds = time.monotonic() - began
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            yield Extender(port, int(children[0]), seconds, metrics)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def client_context(directory: Path) -> ssl.SSLContext:
    """As kube-scheduler has it, with the certificates that the extender has made."""
    context = ssl.create_default_context(cafile=directory / "ca.crt")
    context.load_cert_chain(directory / "client.crt", directory / "client.key")
    return context


def _ready(port: int) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    return False
