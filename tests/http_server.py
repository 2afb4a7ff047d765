"""HTTP servers of a test's own, on loopback: a function answers every request."""

import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Exchange(BaseHTTPRequestHandler):
    """A request, and the way back to who sent it. Every method calls :meth:`do`."""

    protocol_version = "HTTP/1.1"

    def parse_request(self):
        """With its body."""
        if not super().parse_request():
            return False
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        while "chunked" in self.headers.get("Transfer-Encoding", ""):
            length = int(self.rfile.readline(), 16)
            self.body += self.rfile.read(length + 2)[:length]
            if not length:
                break
        return True

    def answer(self, content=b"", status=200, **headers):
        """``headers``: by name, with _ for -. Their ``Content_Length`` is the content's unless it
        is given. After HEAD nothing of the content is sent."""
        self.send_response(status)
        for name, value in ({"Content_Length": len(content)} | headers).items():
            self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def do_GET(self):
        self.do()

    do_PUT = do_POST = do_DELETE = do_HEAD = do_GET  # noqa: N815 - as http.server finds them

    def do(self):
        raise NotImplementedError

    def log_message(self, *_):
        """Not on the test's output."""


class Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        """A client that has gone is no news."""


@contextmanager
def answered_by(answer, host="127.0.0.1"):
    """Yields the server's URL. ``answer(exchange)`` is called for each request."""

    class Every(Exchange):
        def do(self):
            answer(self)

    server = Quiet((host, 0), Every)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://{host}:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
