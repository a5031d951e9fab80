"""Chat templates: rendering as transformers does it, with a record of what the text is made of.

Two kinds of marks travel through a template inside the text and are read off afterwards, so that text, supervised
spans and typed control tokens come from one rendering and cannot drift:

* ``{% generation %}`` blocks are rendered between GENERATION_START and GENERATION_END;
* a control token that someone typed into a message carries TYPED after its first character.

All three are Unicode noncharacters, which no text may contain; a row that does is dropped.
"""

import json
import re
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

TYPED = "\ufdd0"
GENERATION_START = "\ufdd1"
GENERATION_END = "\ufdd2"
RESERVED = re.compile(f"[{TYPED}{GENERATION_START}{GENERATION_END}]")
_GENERATION = re.compile(f"[{GENERATION_START}{GENERATION_END}]")

# Templates that write today's date would give other ids tomorrow. This is the date Llama 3 falls back to; where the
# date matters, chat_template_kwargs sets it (date_string in Llama 3).
TEMPLATE_DATE = datetime(2024, 7, 26)

# What a template may raise on a row it does not like.
TEMPLATE_ERRORS = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)

Span = tuple[int, int]


class Rendering(NamedTuple):
    """A rendered conversation.

    Attributes:
        text: The text, TYPED marks included.
        generated: Spans of the text inside ``{% generation %}`` blocks. Unit: characters, half-open.
    """

    text: str
    generated: tuple[Span, ...]


class _GenerationTag(jinja2.ext.Extension):
    """``{% generation %} ... {% endgeneration %}`` marks what the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads a plain set here

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    @staticmethod
    def _mark(caller: Callable[[], str]) -> str:
        return f"{GENERATION_START}{caller()}{GENERATION_END}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which no model was trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=16)
def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template in a sandbox, with what transformers gives templates.

    Raises:
        jinja2.TemplateSyntaxError: If it is no template.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = TEMPLATE_DATE.strftime
    # A plain dict of globals: jinja2's default chain of maps costs more than rendering a short conversation.
    return jinja2.Template.from_code(environment, environment.compile(source), dict(environment.globals))


def render(
    template: jinja2.Template,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    variables: dict[str, Any],
    *,
    add_generation_prompt: bool,
) -> Rendering:
    """Render messages.

    Args:
        template: From compile_template.
        messages: In the spelling templates read.
        tools: Tool definitions, or None.
        variables: Special tokens by name, and chat_template_kwargs.
        add_generation_prompt: End with what makes the target answer.

    Raises:
        Exception: One of TEMPLATE_ERRORS, if the template does not take these messages.
    """
    text = template.render(
        {
            **variables,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
    )
    if GENERATION_START not in text:
        return Rendering(text, ())
    return _read_generation_marks(text)


def _read_generation_marks(marked: str) -> Rendering:
    spans: list[Span] = []
    open_starts: list[int] = []
    for number, mark in enumerate(_GENERATION.finditer(marked)):
        position = mark.start() - number
        if mark.group() == GENERATION_START:
            open_starts.append(position)
        elif open_starts:
            spans.append((open_starts.pop(), position))
    return Rendering(_GENERATION.sub("", marked), tuple(sorted(spans)))


def has_generation_tag(source: str) -> bool:
    """Tell whether a template marks what the assistant wrote; words in its text do not count."""
    return re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None


def mark_typed_tokens(value: Any, pattern: re.Pattern[str]) -> Any:
    """Put TYPED into every control token that stands in the strings of a value; other objects stay the same ones.

    Args:
        value: Messages or tools.
        pattern: Matches any control token.
    """
    if isinstance(value, str):
        return _mark_text(value, pattern) if pattern.search(value) else value
    if isinstance(value, dict):
        # Keys too: the arguments of a tool call are whatever someone typed.
        return {mark_typed_tokens(key, pattern): mark_typed_tokens(item, pattern) for key, item in value.items()}
    if isinstance(value, list):
        return [mark_typed_tokens(item, pattern) for item in value]
    return value


def _mark_text(text: str, pattern: re.Pattern[str]) -> str:
    pieces: list[str] = []
    at = 0
    while match := pattern.search(text, at):
        # One character on, not behind the token: a token may begin inside another one.
        pieces += [text[at : match.start() + 1], TYPED]
        at = match.start() + 1
    return "".join([*pieces, text[at:]])
