"""A program that serves, started by the tests in a process of its own: python servingprogram.py '<json settings>'."""

import json
import os
import sys
import threading
import time
from pathlib import Path

from cardwise.runtime import httpcalls, logs, serving
from cardwise.runtime.settings import HostPort

released = threading.Event()
stuck = threading.Event()
out = sys.stdout


def say(word: str) -> None:
    os.write(1, f"{word}\n".encode())


def app():
    say("app")

    def wsgi(environ, start_response):
        path = environ["PATH_INFO"]
        if path == "/wait":
            released.wait(60)
        elif path == "/release":
            released.set()
        elif path == "/close":
            environ[httpcalls.CLOSE]()
        elif path == "/stuck":
            stuck.set()
        elif path == "/nap":
            time.sleep(1.0)
        elif path == "/body":
            environ["wsgi.input"].read()
        elif path == "/fail":
            raise RuntimeError("the application has failed")
        elif path == "/echo":
            body = environ["wsgi.input"].read()
            start_response("200 OK", [])
            return [body]
        body = f"{path} {threading.current_thread().name} {os.getpid()}".encode()
        start_response("200 OK", [("Content-Length", str(len(body)))])
        return [body]

    return wsgi


def main() -> None:
    settings = json.loads(sys.argv[1])
    logs.setup("test", "info", "json")
    tls = serving.TlsFiles.in_dir(Path(settings["tls"])) if "tls" in settings else None

    def start() -> None:
        if settings.get("fail"):
            raise RuntimeError("cannot start")
        say("start")

    slow = settings.get("slow")
    serving.Server(
        app,
        [HostPort("127.0.0.1", settings["port"])],
        most_body=1 << 20,
        threads=settings.get("threads", 2),
        tls=tls,
        client_ca=settings.get("client_ca", False),
        on_worker_start=start,
        on_worker_stop=lambda: say("stop"),
        alive=lambda: not stuck.is_set(),
        slow_bind=HostPort("127.0.0.1", slow) if slow else None,
        slow_threads=3,
        graceful_timeout=settings.get("graceful", 5),
    ).run()


if __name__ == "__main__":
    main()
