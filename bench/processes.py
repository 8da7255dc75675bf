"""Starts the measured processes: the extender, and an API server with a synthetic cluster for it."""

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
class ExtenderProcess:
    """A running extender.

    pid: of the serving process.
    ready_seconds: from the start of the process to its first response.
    """

    port: int
    pid: int
    ready_seconds: float
    metrics_port: int = 0

    def rss_mib(self) -> tuple[float, float]:
        """Resident memory in MiB: now, and at its peak."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        sizes = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if line.startswith("Vm")}
        return int(sizes["VmRSS"]) / 1024, int(sizes["VmHWM"]) / 1024

    def threads(self) -> int:
        """The number of threads of the process."""
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def cpu_seconds(self) -> float:
        """The CPU seconds that the process has used so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def synthetic_api_server(nodes: int, pods: int, classes: int = 0, *, fresh: bool = False) -> Iterator[Path]:
    """Run an API server with a synthetic cluster of this size. Yields its kubeconfig.

    fresh: whether no card has a status yet, as just after the installation of Cardwise.
    """
    with tempfile.TemporaryDirectory(prefix="cardwise-bench-") as directory:
        port_file = Path(directory) / "port"
        arguments = [sys.executable, "-m", "bench.apiserver", str(nodes), str(pods), str(classes), str(port_file)]
        arguments += ["--fresh"] * fresh
        with subprocess.Popen(arguments, cwd=ROOT) as process:
            try:
                while not port_file.exists():
                    if process.poll() is not None:
                        raise RuntimeError("the synthetic API server did not start")
                    time.sleep(0.05)
                kubeconfig = Path(directory) / "kubeconfig"
                kubeconfig.write_text(_KUBECONFIG.format(port=port_file.read_text()))
                yield kubeconfig
            finally:
                process.kill()


@contextlib.contextmanager
def compiled_environment(code: Path = ROOT) -> Iterator[dict[str, str]]:
    """Environment variables with which Python finds the extender's modules already compiled, as in an image.

    code: the checkout of the extender.
    """
    with tempfile.TemporaryDirectory(prefix="cardwise-bench-") as directory:
        env = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        env["PYTHONPYCACHEPREFIX"] = directory
        imports = "import extender.__main__, kubernetes.config, kubernetes.client; kubernetes.client.Configuration()"
        subprocess.run([sys.executable, "-c", imports], cwd=code, env=env, check=True)
        yield env


@contextlib.contextmanager
def run_extender(
    kubeconfig: Path,
    *options: str,
    env: dict[str, str] | None = None,
    tls: Path | None = None,
    code: Path = ROOT,
    lock_holds: Path | None = None,
) -> Iterator[ExtenderProcess]:
    """Run the extender of the checkout `code` until the block ends. The extender is ready when the block starts.

    tls: a folder for its certificates, for mutual TLS; None for plain HTTP.
    lock_holds: a file for long holds of the state lock (`lockprobe`); None: they are not measured.
    """
    program = ["-m", "extender"] if lock_holds is None else [str(ROOT / "bench/lockprobe.py"), str(lock_holds)]
    port, metrics = ports.free(2)
    arguments = [sys.executable, *program, "--kubeconfig", str(kubeconfig), "--no-lease"]
    arguments += ["--plain-http"] if tls is None else ["--tls-dir", str(tls)]
    arguments += ["--bind", f"127.0.0.1:{port}", "--metrics-bind", f"127.0.0.1:{metrics}", "--log-level", "warning"]
    start = time.monotonic()
    with subprocess.Popen([*arguments, *options], cwd=code, env=env) as process:
        try:
            while not _is_ready(metrics):
                if process.poll() is not None:
                    raise RuntimeError("the extender did not start")
                time.sleep(0.02)
            seconds = time.monotonic() - start
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            yield ExtenderProcess(port, int(children[0]), seconds, metrics)
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


def client_context(directory: Path) -> ssl.SSLContext:
    """TLS settings of a client like kube-scheduler, with the certificates that the extender created in `directory`."""
    context = ssl.create_default_context(cafile=directory / "ca.crt")
    context.load_cert_chain(directory / "client.crt", directory / "client.key")
    return context


def _is_ready(port: int) -> bool:
    with contextlib.suppress(OSError, http.client.HTTPException):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
        connection.request("GET", "/readyz")
        return connection.getresponse().status == 200
    return False
