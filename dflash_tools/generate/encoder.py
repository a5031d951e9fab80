"""Messages -> the token ids that serving sends."""

from typing import TYPE_CHECKING, TypeVar

from dflash_tools.data.encode import TextEncoder
from dflash_tools.data.manifest import ResolvedData
from dflash_tools.data.marks import mark_typed_tokens, token_pattern
from dflash_tools.data.rows import load_templates
from dflash_tools.data.sample import RowError
from dflash_tools.data.shapes import Conversation
from dflash_tools.data.turns import Chat, MarkedText
from dflash_tools.errors import DataError
from dflash_tools.generate.prompts import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ContentT = TypeVar("ContentT")

# An anchor and a token to draft: with less room an answer could not be trained on.
MIN_ROOM = 2


class PromptEncoder:
    """Messages -> the token ids that serving sends; safe to use from several threads.

    Args:
        data: The data settings.
        tokenizer: The target's.
        max_tokens: Longest sample, prompt and answer together.

    Raises:
        DataError: If there is no chat template, or it is none.
    """

    def __init__(self, data: ResolvedData, tokenizer: "PreTrainedTokenizerBase", max_tokens: int) -> None:
        self._template, self._tools_template = load_templates(tokenizer, data.chat_template_kwargs)
        if self._template is None:
            raise DataError(
                "the tokenizer has no chat template; write the template that serving uses to a file and set "
                "data.chat_template"
            )
        self.control_tokens = self._template.control_tokens
        self._pattern = token_pattern(self.control_tokens)
        self._takes_typed_tokens = data.control_tokens == "token"
        self.max_tokens = max_tokens
        self._encoder = TextEncoder(tokenizer.backend_tokenizer, max_tokens)
        self._tokenizer = tokenizer.backend_tokenizer

    def mark(self, content: ContentT) -> ContentT:
        """Mark control tokens that someone typed, so that they are tokenised as text; by the policy of the data."""
        marked: ContentT = content if self._takes_typed_tokens else mark_typed_tokens(content, self._pattern)
        return marked

    def encode(self, messages: list[Message], tools: list[Message] | None) -> list[int]:
        """Render messages with the generation prompt, and tokenise them in one piece.

        Raises:
            RowError: If the template refuses them, or they leave no room for an answer.
        """
        template = self._template if tools is None else self._tools_template
        assert template is not None
        chat = Chat(Conversation(messages=messages, counts=(True,) * len(messages), tools=tools), template)
        encoded = self._encoder.encode_many([MarkedText(chat.render(len(messages), prompt=True).text, ())])[0]
        if encoded.is_cut or len(encoded.input_ids) > self.max_tokens - MIN_ROOM:
            raise RowError("too_long", f"the prompt leaves no room for an answer within {self.max_tokens} tokens")
        ids: list[int] = encoded.input_ids.tolist()
        return ids

    def decode(self, token_ids: list[int]) -> str:
        """Turn an answer into text, without control tokens, as servers do."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text
