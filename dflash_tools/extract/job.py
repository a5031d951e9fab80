"""What an extraction is about to do, resolved from its config before any row is read and any weight loaded."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dflash_tools.config import ExtractConfig
from dflash_tools.contracts.manifest import TokenizerIdentity
from dflash_tools.data import ResolvedData, load_tokenizer, resolve_data, tokenizer_identity
from dflash_tools.extract.settings import content_settings, library_versions
from dflash_tools.store.arrays import StoreShape
from dflash_tools.target.config_only import TargetShape, read_target_config, shape_of_config
from dflash_tools.target.layers import choose_layers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True, eq=False)
class Job:
    """An extraction, resolved.

    Attributes:
        config: As given.
        data: Every data setting, filled.
        tokenizer: The target's, with the chat template in force.
        tokenizer_identity: What names it in the manifest.
        target: Sizes of the target.
        layer_ids: Captured decoder layers.
        shape: Width and codec of the stored states.
        limit: Take so many samples; None = all.
        settings: What decides the content of the store.
        versions: Libraries that make its bits.
    """

    config: ExtractConfig
    data: ResolvedData
    tokenizer: "PreTrainedTokenizerBase"
    tokenizer_identity: TokenizerIdentity
    target: TargetShape
    layer_ids: tuple[int, ...]
    shape: StoreShape
    limit: int | None
    settings: dict[str, Any]
    versions: dict[str, str]


def resolve_job(config: ExtractConfig, config_dir: Path, limit: int | None) -> Job:
    """Resolve config, data, tokenizer and layers; reads the target's config, not its weights.

    Raises:
        ConfigError: If a setting does not fit the target or a file is missing.
        DataError: If there is no usable tokenizer.
    """
    data = resolve_data(config.data, config_dir)
    target = shape_of_config(read_target_config(config.target))
    layer_ids = choose_layers(
        config.target.target_layer_ids, config.target.num_target_features, target.num_hidden_layers
    )
    tokenizer = load_tokenizer(
        config.target.model,
        revision=config.target.revision,
        gguf_file=config.target.gguf_file,
        trust_remote_code=config.target.trust_remote_code,
        chat_template=data.chat_template,
    )
    identity = tokenizer_identity(tokenizer)
    return Job(
        config=config,
        data=data,
        tokenizer=tokenizer,
        tokenizer_identity=identity,
        target=target,
        layer_ids=layer_ids,
        shape=StoreShape(
            num_layers=len(layer_ids),
            hidden_size=target.hidden_size,
            hidden_states_dtype=config.store.hidden_states_dtype,
            codec=config.store.codec,
            last_hidden_state=config.target.store_last_hidden_state,
        ),
        limit=limit,
        settings=content_settings(config, data, identity, target.config_fingerprint, layer_ids, limit),
        versions=library_versions(),
    )
