"""Loading a tokenizer, and what identifies it."""

import json
from typing import TYPE_CHECKING, Any

from dflash_tools.config import resolve_model_folder
from dflash_tools.contracts.fingerprint import fingerprint_of_json
from dflash_tools.contracts.manifest import TokenizerIdentity
from dflash_tools.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def load_tokenizer(
    model: str,
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
    trust_remote_code: bool = False,
    chat_template: str | None = None,
) -> "PreTrainedTokenizerBase":
    """Load the target's tokenizer.

    Args:
        model: Hub id, local folder, or package:NAME.
        revision: Branch, tag or commit on the hub.
        gguf_file: GGUF file inside the folder that holds the tokenizer.
        trust_remote_code: Run tokenizer code that comes with the checkpoint.
        chat_template: Text of a chat template that replaces the tokenizer's own.

    Raises:
        ConfigError: If the package is not installed.
        DataError: If there is no tokenizer that gives character positions.
    """
    from transformers import AutoTokenizer

    folder = resolve_model_folder(model)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if revision is not None:
        options["revision"] = revision
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError, ImportError) as error:
        first_line = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise DataError(f"{model}: no tokenizer can be loaded: {first_line}") from None
    if not tokenizer.is_fast:
        raise DataError(
            f"{model}: {type(tokenizer).__name__} gives no character positions, which the loss mask needs; "
            "use a checkpoint with a tokenizer.json"
        )
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    if chat_template is not None:
        tokenizer.chat_template = chat_template
    return tokenizer


def tokenizer_identity(tokenizer: "PreTrainedTokenizerBase") -> TokenizerIdentity:
    """Describe a tokenizer; which control tokens the data uses is filled in by who reads the data."""
    template = tokenizer.chat_template
    return TokenizerIdentity(
        fingerprint=tokenizer_fingerprint(tokenizer),
        chat_template_fingerprint=None if template is None else fingerprint_of_json(template),
        num_tokens=len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_ids=() if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,),
        pad_token_id=tokenizer.pad_token_id,
        mask_token_id=tokenizer.mask_token_id,
        control_token_ids=tuple(sorted({*tokenizer.added_tokens_decoder, *tokenizer.all_special_ids})),
        used_control_token_ids=(),
    )


def tokenizer_fingerprint(tokenizer: "PreTrainedTokenizerBase") -> str:
    """Hash what decides token ids: vocabulary, merges, added tokens, and every step of the pipeline."""
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    for setting in ("truncation", "padding", "version"):
        content.pop(setting, None)
    return fingerprint_of_json(content)


def special_tokens(tokenizer: "PreTrainedTokenizerBase") -> set[str]:
    """List the tokens that only a template may write: special added tokens, and those with a part such as EOS."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return added | set(tokenizer.all_special_tokens)


def template_sources(tokenizer: "PreTrainedTokenizerBase") -> tuple[str | None, str | None]:
    """Give the template for rows without tools and for rows with tools; None = the tokenizer has none.

    Raises:
        DataError: If it has several and none of them is the default.
    """
    template = tokenizer.chat_template
    if not isinstance(template, dict):
        return template, template
    if "default" not in template:
        raise DataError(
            f"the tokenizer has chat templates {', '.join(sorted(template))} and no default; "
            "write the right one to a file and set data.chat_template"
        )
    return template["default"], template.get("tool_use", template["default"])
