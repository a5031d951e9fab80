"""Ask a server over HTTP until it answers: a pause that doubles between tries, or as long as the server says."""

import email.utils
import json
import os
import random
import threading
import time
from typing import Any

import urllib3

from dflash_tools.config import ServerSection
from dflash_tools.data.sample import RowError
from dflash_tools.errors import ConfigError
from dflash_tools.generate.apis import APIS, Question, UnusableAnswer
from dflash_tools.generate.dialogue import Answer

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 60.0
CONNECT_SECONDS = 30.0

NO_ANSWER = "no_answer"
REFUSED = "refused_by_server"

_BUSY = (408, 409, 425, 429)
_WRONG_ADDRESS = (401, 403, 404, 405)


class _TryAgain(Exception):
    """A try that failed in a way that may pass; ``pause`` is what the server asks for. Unit: seconds."""

    def __init__(self, reason: str, pause: float = 0.0) -> None:
        super().__init__(reason)
        self.pause = pause


class Stopped(Exception):
    """The command ends; nobody waits for this answer."""


class Client:
    """A server that runs the target; safe to use from several threads.

    Args:
        server: The ``[server]`` table.

    Raises:
        ConfigError: If the address is none, or the environment variable of the key is not set.
    """

    def __init__(self, server: ServerSection) -> None:
        self._server = server
        self._api = APIS[server.api]
        self._url = _join(server.base_url, self._api.path)
        self._headers = {"Content-Type": "application/json", **_read_key(server.api_key_env)}
        self._pool = urllib3.PoolManager(maxsize=server.concurrency, retries=False)
        self._stop = threading.Event()

    def stop(self) -> None:
        """End all pauses; what is asked after this raises Stopped."""
        self._stop.set()

    def ask(self, question: Question) -> Answer:
        """Get the answer to one question.

        Raises:
            RowError: ``no_answer`` after all tries; ``refused_by_server`` if the question itself is refused.
            ConfigError: If no question could be answered this way: wrong address, key or model, or no token ids.
        """
        body = json.dumps(self._api.write(question)).encode()
        for number in range(self._server.max_retries + 1):
            if self._stop.is_set():
                raise Stopped
            try:
                return self._api.read(self._post(body), question)
            except (_TryAgain, UnusableAnswer) as error:
                problem = error
            if number < self._server.max_retries:
                wanted = problem.pause if isinstance(problem, _TryAgain) else 0.0
                self._stop.wait(max(pause_seconds(number), wanted))
        raise RowError(NO_ANSWER, f"{self._url}: {problem}, {self._server.max_retries + 1} tries")

    def _post(self, body: bytes) -> Any:
        timeout = self._server.timeout_seconds
        deadline = time.monotonic() + timeout
        try:
            response = self._pool.request(
                "POST",
                self._url,
                body=body,
                headers=self._headers,
                timeout=urllib3.Timeout(connect=min(CONNECT_SECONDS, timeout), read=timeout),
                preload_content=False,
                redirect=False,
            )
            try:
                content = _read(response, deadline)
            except BaseException:
                response.close()  # a connection with unread bytes is of no further use
                raise
            response.release_conn()
        except urllib3.exceptions.HTTPError as error:
            raise _TryAgain(_describe(error)) from None
        if response.status == 200:
            try:
                return json.loads(content)
            except ValueError:
                raise _TryAgain("the reply is no JSON") from None
        raise self._explain(response.status, response.headers.get("Retry-After", ""), content)

    def _explain(self, status: int, retry_after: str, content: bytes) -> Exception:
        said = f"status {status}: {_message(content)}"
        if status in _BUSY or status >= 500:
            return _TryAgain(said, _read_pause(retry_after))
        if status in _WRONG_ADDRESS or status < 400:
            return ConfigError(
                f"{self._url}: {said}; correct server.base_url, server.api, server.model or server.api_key_env"
            )
        return RowError(REFUSED, said)


def pause_seconds(number: int) -> float:
    """Length of a pause: doubled each time, and spread so that many waiting conversations do not return at once."""
    return float(min(FIRST_PAUSE_SECONDS * 2**number, LONGEST_PAUSE_SECONDS)) * random.uniform(0.75, 1.25)


def _join(base_url: str, path: str) -> str:
    address = base_url.rstrip("/").removesuffix("/v1")
    try:
        parsed = urllib3.util.parse_url(address)
    except urllib3.exceptions.LocationParseError:
        parsed = urllib3.util.Url()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"server.base_url = {base_url!r}: no address; write it as http://127.0.0.1:8000")
    return address + path


def _read_key(variable: str) -> dict[str, str]:
    if not variable:
        return {}
    if not os.environ.get(variable):
        raise ConfigError(
            f"server.api_key_env = {variable!r}: no such environment variable; set it, or the option to ''"
        )
    return {"Authorization": f"Bearer {os.environ[variable]}"}


def _read(response: urllib3.BaseHTTPResponse, deadline: float) -> bytes:
    """Read a reply; one that comes drop by drop may not outlast the deadline."""
    parts = []
    while part := response.read1():
        parts.append(part)
        if time.monotonic() > deadline:
            raise _TryAgain("the reply did not end in time")
    return b"".join(parts)


def _describe(error: urllib3.exceptions.HTTPError) -> str:
    if isinstance(error, urllib3.exceptions.NewConnectionError):
        return "no connection"
    if isinstance(error, urllib3.exceptions.TimeoutError):
        return "no reply in time"
    if isinstance(error, urllib3.exceptions.ProtocolError):
        return "the connection was cut"
    return f"{type(error).__name__}: {error}"


def _read_pause(retry_after: str) -> float:
    """Read a Retry-After header: a number of seconds, or a date."""
    try:
        seconds = float(retry_after)
    except ValueError:
        parsed = email.utils.parsedate_tz(retry_after)
        seconds = email.utils.mktime_tz(parsed) - time.time() if parsed else 0.0
    return min(max(seconds, 0.0), 3600.0)


def _message(content: bytes) -> str:
    """Find what a server says: its error message, or the start of whatever it sent."""
    text = content.decode("utf-8", errors="replace")
    try:
        value = json.loads(text)
        if isinstance(value, dict):
            error = value.get("error", value)
            text = str(error.get("message", error) if isinstance(error, dict) else error)
    except ValueError:
        pass
    return " ".join(text.split())[:300] or "no message"
