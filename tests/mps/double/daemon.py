"""What the double of NVIDIA's control daemon knows and answers: in the program beside it, and within tests (hosts.py).

As drivers 535, 550, 580 and 595 were seen to do, traps and all. A test speaks to it by files in the log folder:
`clients` (PIDs, one a line), `fault` (a client's fault; heals when no client is left), `server-fails`,
`server-starting` (it never gets further), `server-limit-kept` (setting a running server's limit does nothing),
`terminate-fails`; it writes `terminated`.
"""

import re
from pathlib import Path

LONGEST = 4095
GIB, MIB = 1 << 30, 1 << 20


class Ended(Exception):
    """The daemon has come to its end, with this return code."""


class Server:
    """`process` has `pid`, `poll`, `terminate`, `kill` and `wait`, as a Popen."""

    def __init__(self, process, uid, percentage, limits):
        self.process, self.pid = process, process.pid
        self.uid, self.percentage, self.limits = uid, percentage, dict(limits)
        self.requests = 0


class Daemon:
    """All it knows is lost with it. `host` says and does what needs processes and time: `log`, `start_server`,
    `is_running`, `now`, `sleep`.
    """

    def __init__(self, driver, folder, host, percentage="100"):
        self.driver, self.folder, self.host = driver, Path(folder), host
        self.limits, self.priority, self.server = {}, 0, None
        self.percentage = self.read_percentage(percentage, 100.0)
        self.queue = []  # users who wait for their server until the one before has no client

    def handle_command(self, content, uid):
        """The answer to what a front end has sent at once. Raises Ended."""
        if len(content) >= LONGEST and self.driver >= 580:
            raise Ended(139)
        # Old drivers take a line that is too long for several.
        parts = [content[start : start + LONGEST] for start in range(0, len(content), LONGEST)]
        return "".join(self.obey(part.decode(errors="replace"), uid) for part in parts)

    def obey(self, line, uid):
        self.host.log(f"Cmd:{line}")
        name, *arguments = line.split()
        if uid:
            if name == "quit":
                return "Not enough privilege to execute quit command\n"
            if (name.startswith("set_") and self.driver >= 550) or (
                name == "start_server" and arguments[1:] != [str(uid)]
            ):
                return f"Insufficient privileges for UID {uid}.\n"
        command = getattr(self, f"do_{name}", None)
        if command is None or (name == "get_server_status" and self.driver < 550):
            return f'Unknown command "{name}"\n'
        return command(*arguments) or ""

    # The server, which starts when it is asked for and stays.

    def living(self):
        if self.server is not None and self.server.process.poll() is not None:
            self.host.log(f"Server {self.server.pid} exited with status {self.server.process.returncode}")
            self.server = None
            if self.queue:
                self.start(self.queue.pop(0))
        return self.server

    def start(self, uid):
        self.server = Server(self.host.start_server(), uid, self.percentage, self.limits)
        self.host.log(f"Starting new server {self.server.pid} for user {uid}")

    def named(self, pid):
        server = self.living()
        return server if server is not None and str(server.pid) == pid else None

    def clients(self):
        try:
            return [int(pid) for pid in (self.folder / "clients").read_text().split() if self.host.is_running(int(pid))]
        except OSError:
            return []

    def do_get_server_list(self, *_):
        return f"{self.server.pid}\n" if self.living() else ""

    def do_start_server(self, *arguments):
        if len(arguments) != 2:
            return "A user id (UID) is required to start a new server\n"
        if self.living() is None:
            self.start(arguments[1])
        elif self.server.uid != arguments[1]:
            self.queue.append(arguments[1])
        return None

    def do_get_server_status(self, pid="", *_):
        server = self.named(pid)
        if server is None:
            return f"Server {pid} not found\n"
        server.requests += 1
        if (self.folder / "fault").exists():
            if self.clients():
                return "FAULT\n"
            (self.folder / "fault").unlink()
        return "INITIALIZING\n" if server.requests < 2 or (self.folder / "server-starting").exists() else "ACTIVE\n"

    def do_get_client_list(self, pid="", *_):
        if self.named(pid) is None:
            return f"Server {pid} not found\n"
        return "".join(f"{client}\n" for client in self.clients())

    do_get_device_client_list = do_get_client_list

    def do_ps(self, *_):
        server = self.living()
        if server is None:
            return "Server not found\n"
        lines = ["PID       ID    SERVER    DEVICE             NAMESPACE      COMMAND"]
        lines += [f"{client}  1  {server.pid}  GPU-0  4026531836  python" for client in self.clients()]
        return "\n".join(lines) + "\n"

    def do_terminate_client(self, server="", client="", *_):
        if self.named(server) is None:
            return f"Server {server} not found\nServer {server} not found!\n1\n"
        if (self.folder / "terminate-fails").exists():
            return None
        remaining = [pid for pid in self.clients() if str(pid) != client]
        (self.folder / "clients").write_text("".join(f"{pid}\n" for pid in remaining))
        with (self.folder / "terminated").open("a") as file:
            file.write(f"{client}\n")
        return "0\n"

    def do_shutdown_server(self, pid="", *_):
        if self.named(pid) is None:
            return f"Server {pid} not found\n"
        self.server.process.terminate()
        return None

    # Settings: those of the daemon are for its next server.

    def do_get_default_active_thread_percentage(self, *_):
        return f"{self.percentage:.1f}\n"

    def do_set_default_active_thread_percentage(self, setting="", *_):
        self.percentage = self.read_percentage(setting, self.percentage)
        return f"{self.percentage:.1f}\n"

    def do_get_active_thread_percentage(self, pid="", *_):
        server = self.named(pid)
        return f"{server.percentage:.1f}\n" if server else f"Server {pid} not found\n"

    def do_set_active_thread_percentage(self, pid="", setting="", *_):
        server = self.named(pid)
        if server is None:
            return f"Server {pid} not found\n"
        server.percentage = self.read_percentage(setting, server.percentage)
        return f"{server.percentage:.1f}\n"

    def do_get_default_device_pinned_mem_limit(self, device="", *_):
        return shown(self.limits.get(self.device(device), 0))

    def do_set_default_device_pinned_mem_limit(self, device="", setting="", *_):
        if device.isdigit() or self.driver >= 580:  # before, a UUID is passed over
            self.limits[self.device(device)] = size(setting)

    def do_get_device_pinned_mem_limit(self, pid="", device="", *_):
        server = self.named(pid)
        if server is None:
            return f"Server {pid} not found\n"
        return shown(server.limits.get(self.device(device), 0)) if server.requests >= 2 or self.driver < 550 else ""

    def do_set_device_pinned_mem_limit(self, pid="", device="", setting="", *_):
        server = self.named(pid)
        if server is None:
            return f"Server {pid} not found\n"
        if not (self.folder / "server-limit-kept").exists():
            server.limits[self.device(device)] = size(setting)
        return None

    def device(self, text):
        """Old drivers read a UUID as 0."""
        return text if self.driver >= 580 and not text.isdigit() else re.match(r"\d*", text)[0] or "0"

    def do_get_default_client_priority(self, *_):
        return f"{self.priority}\n"

    def do_set_default_client_priority(self, setting="", *_):
        if setting not in ("0", "1"):
            return "Invalid priority value - must be 0 or 1!\n"
        self.priority = int(setting)
        return None

    def do_quit(self, *arguments):
        deadline = self.host.now() + int(arguments[1]) if arguments[:1] == ("-t",) else float("inf")
        while self.clients() and self.host.now() < deadline:
            self.host.sleep(0.05)
        if self.living() is not None:
            self.server.process.kill()
            self.server.process.wait()
        self.host.log("Exit with status 0")
        raise Ended(0)

    def read_percentage(self, setting, before):
        try:
            number = float(setting.removesuffix("%"))
        except ValueError:
            number = 0.0
        if 0.0 < number <= 100.0:
            return number
        self.host.log("Invalid percentage, expected between (0.0, 100.0]")
        return before


def size(text):
    """Bytes, 0 for no limit, as the real one reads it."""
    whole = re.fullmatch(r"(-?\d+)([GgMm])?[Bb]?", text)
    if whole:
        return int(whole[1]) * (GIB if (whole[2] or "M") in "Gg" else MIB) % (1 << 64)
    start = re.match(r"-?\d+", text)
    return int(start[0]) * MIB % (1 << 64) if start else 0


def shown(limit):
    """Whole GiB from one GiB on: 8138M is told as 7G."""
    if not limit:
        return ""
    return f"{limit // GIB}G\n" if limit >= GIB else f"{limit // MIB}M\n"
