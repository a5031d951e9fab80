"""A real HTTP server on loopback that answers by token ids, after it has misbehaved as told."""

import json
import threading
import time
from collections import Counter
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

STOP_ID = 2  # <|im_end|> of the tiny tokenizer


def answer_ids(prompt):
    """What this server writes: three tokens that depend on the prompt, and the end of the turn."""
    return [30 + (sum(prompt) + place) % 200 for place in range(3)] + [STOP_ID]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        server = self.server
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompt = request["prompt"] if self.path == "/v1/completions" else request["input_ids"]
        with server.guard:
            server.requests.append((self.path, request, self.headers.get("Authorization")))
            server.tries[tuple(prompt)] += 1
            number = server.tries[tuple(prompt)]
        server.behave(self, prompt, number)

    def send(self, status, content, **headers):
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def cut(self):
        """Promise a body, send a part of it and hang up."""
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        self.wfile.write(b'{"choices": [')
        self.close_connection = True

    def drip(self, seconds):
        """Send a byte now and then, for ever."""
        self.send_response(200)
        self.send_header("Content-Length", "1000")
        self.end_headers()
        try:
            for _ in range(1000):
                self.wfile.write(b" ")
                self.wfile.flush()
                time.sleep(seconds)
        except OSError:
            self.close_connection = True

    def reply_as_vllm(self, prompt, **changes):
        choice = {"token_ids": answer_ids(prompt), "prompt_token_ids": prompt, "finish_reason": "stop", "text": "x"}
        self.send(200, {"choices": [{**choice, **changes}]})

    def reply_as_sglang(self, prompt, **changes):
        finish = {"type": "stop", "matched": STOP_ID}
        self.send(200, {"output_ids": answer_ids(prompt), "meta_info": {"finish_reason": finish}, **changes})

    def log_message(self, *args):
        pass


class Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, request, client_address):
        pass  # clients hang up on purpose


@contextmanager
def serve(behave):
    """Run a server.

    Args:
        behave: Called with the handler, the prompt, and how often this prompt was sent, from 1.
    """
    server = Server(("127.0.0.1", 0), Handler)
    server.behave, server.requests, server.tries, server.guard = behave, [], Counter(), threading.Lock()
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
