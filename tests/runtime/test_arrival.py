"""When a call came is known to the application, also when no thread was free for it then."""

import http.client
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.runtime.test_serving import free_port

_PROGRAM = """
import sys, time
from cardwise.runtime import httpcalls, logs, serving
from cardwise.runtime.settings import HostPort

def wsgi(environ, start_response):
    late = str(time.monotonic() - environ[httpcalls.ARRIVED]).encode()
    time.sleep(0.5)
    start_response("200 OK", [("Content-Length", str(len(late)))])
    return [late]

logs.setup("test", "error", "json")
serving.Server(lambda: wsgi, [HostPort("127.0.0.1", int(sys.argv[1]))], most_body=9, threads=1).run()
"""


def test_the_time_in_the_queue_of_the_threads_counts():
    root = Path(__file__).parents[2]
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(port)], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}
    )
    waited = []

    def ask():
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        for _ in range(2):  # the second one on a connection that is kept
            connection.request("GET", "/")
            waited.append(float(connection.getresponse().read()))
        connection.close()

    try:
        until = time.monotonic() + 15
        while True:
            try:
                ask()
                break
            except OSError:
                assert time.monotonic() < until
                time.sleep(0.05)
        assert max(waited) < 0.4
        waited.clear()
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sum(seconds > 0.3 for seconds in waited) >= 2
    finally:
        process.terminate()
        process.wait(10)
