"""kube-proxy, for clusters whose parts run in pods: pods reach the API server, and the host reaches Services.

Its rules are of the whole machine, so one cluster at a time has them; others wait for its end.
"""

from pathlib import Path

import yaml

from tests.cluster import binaries, ports
from tests.cluster.network import Network
from tests.cluster.processes import PATIENCE, Process, run, wait_for

PROXY = "kube-proxy"
_FIREWALL = "KUBE-FIREWALL"
_WAIT = 600  # seconds for another cluster to end


class Services:
    """The Services of one cluster."""

    def __init__(self, state: Path, kube_bin: Path) -> None:
        self._state = state
        self._program = str(kube_bin / PROXY)
        self._process = Process(state, PROXY)
        self._config = state / "kube-proxy.yaml"

    def start(self, kubeconfig: Path, network: Network) -> None:
        """Returns when its rules are there."""
        health, metrics = ports.free(2)
        config = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "clientConnection": {"kubeconfig": str(kubeconfig)},
            "hostnameOverride": "n1",
            "bindAddress": network.node_address(1),
            "healthzBindAddress": f"127.0.0.1:{health}",
            "metricsBindAddress": f"127.0.0.1:{metrics}",
            # Answers to pods of the same bridge would else go straight to them, past the rules.
            "iptables": {"masqueradeAll": True, "localhostNodePorts": False},
            # Settings of the machine that we leave alone.
            "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        }
        self._config.write_text(yaml.safe_dump(config))
        lock = binaries.cache_root() / "services.lock"
        command = ["flock", "--no-fork", str(lock), self._program, f"--config={self._config}", "--v=2"]
        self._process.start(command)
        self._process.wait_until(lambda: b"SyncProxyRules complete" in self._process.log.read_bytes(), "rules", _WAIT)

    def stop(self) -> None:
        """Takes its rules away while nobody else can have any."""
        if not self._process.is_alive():
            return
        if not Path(f"/proc/{self._process.pid}/cmdline").read_bytes().startswith(self._program.encode()):
            self._process.kill()  # it still waits for the lock: the rules that there are are another cluster's
            return
        self._process.pause()
        run([self._program, "--cleanup"], check=False, timeout=PATIENCE)
        # It leaves this one to a kubelet, and ours make none.
        for program in ("iptables", "ip6tables"):
            for words in ("-D INPUT -j {0}", "-D OUTPUT -j {0}", "-F {0}", "-X {0}"):
                run([program, "-w", *words.format(_FIREWALL).split()], check=False)
        self._process.kill()
        wait_for(lambda: not self._process.is_alive())
