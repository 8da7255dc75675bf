"""A program that serves, started by the tests in a process of its own: python servingprogram.py '<json settings>'."""

import json
import os
import sys
import threading
from pathlib import Path

from cardwise.runtime import logs
from cardwise.runtime.http import serving
from cardwise.runtime.settings import HostPort

released = threading.Event()
stuck = threading.Event()


def write_word(word: str) -> None:
    os.write(1, f"{word}\n".encode())


def app():
    write_word("app")

    def wsgi(environ, start_response):
        path = environ["PATH_INFO"]
        if path == "/wait":
            write_word("waits")
            released.wait()
        elif path == "/release":
            released.set()
        elif path == "/stuck":
            stuck.set()
        elif path == "/echo":
            environ["wsgi.input"].read()
        start_response("200 OK", [])
        return [f"{path} {threading.current_thread().name} {os.getpid()}".encode()]

    return wsgi


def main() -> None:
    settings = json.loads(sys.argv[1])
    logs.configure("test", "info", "json")
    tls = serving.TlsFiles.in_dir(Path(settings["tls"])) if "tls" in settings else None

    def start() -> None:
        if settings.get("fail"):
            raise RuntimeError("cannot start")
        write_word("start")

    slow = settings.get("slow")
    serving.Server(
        app,
        [HostPort("127.0.0.1", settings["port"])],
        max_body_bytes=1 << 20,
        threads=3,  # two for one address
        tls=tls,
        client_ca=settings.get("client_ca", False),
        on_worker_start=start,
        on_worker_stopping=lambda: None if settings.get("hangs") else released.set(),
        on_worker_stop=lambda: write_word("stop"),
        alive=lambda: not stuck.is_set(),
        prompt=["/prompt"],
        slow_bind=HostPort("127.0.0.1", slow) if slow else None,
        slow_threads=3,
        graceful_timeout=settings.get("graceful", 5),
    ).run()


if __name__ == "__main__":
    main()
