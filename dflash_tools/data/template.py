"""Chat templates: rendering as transformers does it, with what a template's own habits tell about its output."""

import json
import re
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from os.path import commonprefix
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment

from dflash_tools.data.marks import GENERATION_END, GENERATION_START, token_pattern

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


class ChatTemplate:
    """A chat template, with the control tokens it writes; safe to pickle.

    Args:
        source: The template.
        variables: What it sees beside the messages: special tokens by name, and chat_template_kwargs.
        special_tokens: Tokens that only a template may write.
        added_tokens: Other added tokens; those that mark the borders of turns in this template are control tokens too.

    Attributes:
        source: The template.
        is_marked: It marks what the assistant wrote by ``{% generation %}``.
        control_tokens: Special tokens, and the tokens that mark the borders of turns.
        pattern: Matches any control token.
        document_end: What is written only after the last turn, such as an EOS behind the end-of-turn token. The target
            never emits it.

    Raises:
        jinja2.TemplateSyntaxError: If it is no template.
    """

    def __init__(
        self, source: str, variables: dict[str, Any], special_tokens: set[str], added_tokens: set[str]
    ) -> None:
        self.source = source
        self._variables = variables
        self.is_marked = re.search(r"\{%[-+]?\s*generation\s*[-+]?%\}", source) is not None
        answered, asked_again = self._render_probe(2), self._render_probe(3)
        self.control_tokens = special_tokens | {token for token in added_tokens if token in asked_again}
        self.pattern = token_pattern(self.control_tokens)
        self.document_end = _find_document_end(answered, asked_again, self.pattern)

    def _render_probe(self, num_messages: int) -> str:
        probe = [("user", "a"), ("assistant", "b"), ("user", "c")]
        messages = [{"role": role, "content": content} for role, content in probe[:num_messages]]
        compile_template(self.source)
        try:
            return self.render(messages, None, add_generation_prompt=False).text
        except TEMPLATE_ERRORS:
            return ""

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, add_generation_prompt: bool
    ) -> Rendering:
        """Render messages.

        Args:
            messages: In the spelling templates read.
            tools: Tool definitions, or None.
            add_generation_prompt: End with what makes the target answer.

        Raises:
            Exception: One of TEMPLATE_ERRORS, if the template does not take these messages.
        """
        text = compile_template(self.source).render(
            {
                **self._variables,
                "messages": messages,
                "tools": tools,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
        if GENERATION_START not in text:
            return Rendering(text, ())
        return _read_generation_marks(text)


def _find_document_end(answered: str, asked_again: str, pattern: re.Pattern[str]) -> str:
    """Compare a conversation with and without a further question.

    If what both share ends with a whole end-of-turn token and the shorter one goes on, then by what no turn ends with.
    """
    shared = commonprefix([answered, asked_again])  # noqa: RUF071 - characters are what is wanted
    ends = [match.end() for match in pattern.finditer(answered) if match.end() <= len(shared)]
    if not ends or shared == answered or re.search("[bc]", pattern.sub("", answered[ends[-1] :])):
        return ""
    return answered[ends[-1] :].lstrip()


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
