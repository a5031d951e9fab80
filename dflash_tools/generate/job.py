"""What a generation is about to do, resolved from its config before any weight is loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_tools.config import DataSection, GenerateConfig
from dflash_tools.contracts.fingerprint import fingerprint_of_json
from dflash_tools.data import ResolvedData, load_tokenizer, resolve_data
from dflash_tools.data.tokenizer import tokenizer_fingerprint
from dflash_tools.errors import ConfigError
from dflash_tools.generate.encoder import PromptEncoder
from dflash_tools.target.config_only import read_target_config, shape_of_config

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Where the target runs, and what is cached of it: neither changes its answers.
_OTHER_KEYS = ("device", "device_map", "target_layer_ids", "num_target_features", "store_last_hidden_state")


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """A generation, resolved.

    Attributes:
        config: As given.
        data: Every data setting, filled; ``max_tokens`` is no longer than the target's positions.
        tokenizer: The target's, with the chat template in force.
        encoder: Messages to token ids.
        settings: What decides the answer to a prompt.
    """

    config: GenerateConfig
    data: ResolvedData
    tokenizer: "PreTrainedTokenizerBase"
    encoder: PromptEncoder
    settings: dict[str, Any]


def resolve_job(config: GenerateConfig, config_dir: Path) -> Job:
    """Resolve config, data and tokenizer; reads the target's config, not its weights.

    Raises:
        ConfigError: If a setting does not fit or a file is missing.
        DataError: If there is no usable tokenizer or chat template.
    """
    data = resolve_data(DataSection(**config.data.model_dump()), config_dir)
    shape = shape_of_config(read_target_config(config.target))
    max_tokens = min(data.max_tokens, shape.max_tokens or data.max_tokens)
    tokenizer = load_tokenizer(
        config.target.model,
        revision=config.target.revision,
        gguf_file=config.target.gguf_file,
        trust_remote_code=config.target.trust_remote_code,
        chat_template=data.chat_template,
    )
    settings = {f"target.{name}": value for name, value in config.target.model_dump(exclude={*_OTHER_KEYS}).items()}
    settings |= {f"sampling.{name}": value for name, value in config.sampling.model_dump().items()}
    settings |= {
        "target's config": shape.config_fingerprint,
        "tokenizer": tokenizer_fingerprint(tokenizer),
        "chat template": fingerprint_of_json(tokenizer.chat_template),
        "data.chat_template_kwargs": data.chat_template_kwargs,
        "data.control_tokens": data.control_tokens,
        "data.max_tokens": max_tokens,
        "written by": config.server.api if config.server.base_url else "transformers",
    }
    return Job(
        config=config,
        data=data,
        tokenizer=tokenizer,
        encoder=PromptEncoder(data, tokenizer, max_tokens),
        settings=settings,
    )


def check_out(out: Path) -> None:
    """Refuse a name that the files beside it could not be derived from.

    Raises:
        ConfigError: If it does not end in .jsonl.
    """
    if out.suffix != ".jsonl":
        raise ConfigError(f"--out {out}: the answers are JSON lines; give a name that ends in .jsonl")
